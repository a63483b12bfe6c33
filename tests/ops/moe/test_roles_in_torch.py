"""Products of the experts by warps with roles, their own source run on a CPU with torch in place of Gluon's language.

See ``tests.ops.gluon_in_torch`` for what this catches. Copies of the engine and of threads end when a seed says so.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sidestream.ops.moe import reference
from tests.ops.gluon_in_torch import Machine, Pointer, Shared, Sum, allocate, functions_of, language, with_functions
from tests.tolerances import BF16_STEPS

feed = pytest.importorskip("sidestream.ops.moe.triton_expert_feed")
roles = pytest.importorskip("sidestream.ops.moe.triton_expert_roles")

FUNCTIONS = [*functions_of(feed), *functions_of(roles)]
LIMIT = 1.5
PROGRAMS = 3


@dataclass(frozen=True)
class Described:
    """A matrix of which the engine copies blocks of one size."""

    matrix: torch.Tensor
    block: tuple[int, int]

    def at(self, place: list[Any]) -> torch.Tensor:
        (row, column), (rows, columns) = map(int, place), self.block
        found = self.matrix[row : row + rows, column : column + columns]
        assert found.shape == self.block, "a block beyond its matrix"
        return found


class Written(Shared):
    """Shared memory that tells who stored to it."""

    def __init__(self, data: torch.Tensor, storing: set[int]) -> None:
        super().__init__(data)
        self.storing = storing

    def index(self, i: int) -> Written:
        return Written(self.data[i], self.storing)

    def store(self, value: torch.Tensor) -> None:
        super().store(value)
        self.storing.add(threading.get_ident())


class Copying(Machine):
    """Copies to shared memory end at any time behind their start, those out of it when they are waited for. What
    threads copied (``gathered``) or stored needs a fence before tensor cores or the engine read it."""

    def __init__(self, seed: int, *, gathered: bool) -> None:
        super().__init__(seed, engine=self.end_one)
        self.gathered = gathered
        self.brought: list[Callable[[], None]] = []
        self.gathering: list[tuple[Shared, Pointer]] = []
        self.taken: dict[int, list[tuple[torch.Tensor, Shared, torch.Tensor]]] = {}
        self.copied: set[int] = set()
        self.stored: set[int] = set()

    def allocate(self, *given: Any) -> Written:
        return Written(allocate(*given).data, self.stored)

    def end_one(self) -> bool:
        if not self.brought:
            return False
        self.brought.pop(self.roles.random.randrange(len(self.brought)))()
        return True

    def expect(self, barrier: Shared, size: int) -> None:
        self.barrier(barrier).arrive(1, bytes=size)

    def bring(self, source: Described, place: list[Any], barrier: Shared, target: Shared) -> None:
        values = source.at(place)
        assert values.shape == target.data.shape
        target.data.fill_(torch.nan)

        def end() -> None:
            target.data.copy_(values)
            self.barrier(barrier).arrive(bytes=-values.nbytes)

        self.brought.append(end)

    def take(self, target: Described, place: list[Any], source: Shared) -> None:
        me = threading.get_ident()
        assert me not in self.stored, "the engine reads what is not fenced"
        self.taken.setdefault(me, []).append((target.at(place), source, source.data.clone()))

    def wait_taken(self, outstanding: int) -> None:
        assert outstanding == 0
        for values, source, seen in self.taken.pop(threading.get_ident(), []):
            assert torch.equal(source.data, seen), "memory changed under a copy out of it"
            values.copy_(seen)

    def gather(self, target: Shared, source: Pointer) -> None:
        target.data.fill_(torch.nan)
        self.gathering.append((target, source))

    def gathered_arrive(self, barrier: Shared, *, increment_count: bool) -> None:
        assert not increment_count
        copies, self.gathering = self.gathering, []

        def end() -> None:
            for target, source in copies:
                target.data.copy_(source.load())
            self.barrier(barrier).arrive(128)

        self.brought.append(end)

    def fence(self) -> None:
        self.copied.discard(threading.get_ident())
        self.stored.discard(threading.get_ident())

    def wait(self, barrier: Shared, phase: int) -> None:
        super().wait(barrier, phase)
        if self.gathered:
            self.copied.add(threading.get_ident())

    def product(self, a: Shared, b: Shared, acc: Any, **how: bool) -> Sum:
        assert threading.get_ident() not in self.copied, "a product of what is not fenced"
        return super().product(a, b, acc, **how)


def names_of(machine: Copying, program: int, programs: int) -> dict[str, Any]:
    """Names that the modules' functions use."""

    def either(mask: Any, x: Any, y: Any) -> torch.Tensor:
        return torch.where(torch.as_tensor(mask), torch.as_tensor(x), torch.as_tensor(y))

    def load(source: Pointer, mask: Any = None, other: Any = 0) -> torch.Tensor:
        return source.load(None if mask is None else torch.as_tensor(mask), other)

    def least(x: torch.Tensor, y: Any, propagate_nan: object = None) -> torch.Tensor:
        return torch.minimum(x, torch.as_tensor(y))

    def most(x: torch.Tensor, y: Any, propagate_nan: object = None) -> torch.Tensor:
        return torch.maximum(x, torch.as_tensor(y))

    def silu(_asm: object, _constraints: str, given: list[torch.Tensor], *_: Any, **__: Any) -> torch.Tensor:
        return given[0] * torch.sigmoid(given[0])

    own = {
        "allocate_shared_memory": machine.allocate,
        "where": either,
        "load": load,
        "minimum": least,
        "maximum": most,
        "inline_asm_elementwise": silu,
        "warp_specialize": machine.specialize,
    }
    names: dict[str, Any] = {
        "gl": language((program, 0), (programs, 1), **own),
        "mbarrier": types.SimpleNamespace(**vars(machine.mbarrier), expect=machine.expect),
        "tma": types.SimpleNamespace(
            async_copy_global_to_shared=machine.bring,
            async_copy_shared_to_global=machine.take,
            store_wait=machine.wait_taken,
        ),
        "async_copy": types.SimpleNamespace(
            async_copy_global_to_shared=machine.gather, mbarrier_arrive=machine.gathered_arrive
        ),
        "fence_async_shared": machine.fence,
        "warpgroup_mma": machine.product,
        "warpgroup_mma_wait": machine.wait_product,
        "_LEAD": roles._LEAD.value,
        "_ALL": None,
        "_SILU": None,
    }
    names = with_functions(names, FUNCTIONS)
    names["_halves"] = lambda total: total.split(128, dim=1)
    return names


class Launched:
    """In the place of the kernel: its programs one after the other, with what tensors and descriptors are to it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*given: Any, num_warps: int, **constants: Any) -> None:
            assert num_warps == 4
            for program in range(*grid):
                machine = Copying(self.seed + program, gathered=constants["gated"])
                names_of(machine, program, *grid)["products"](*map(in_torch, given), **constants)
                assert not machine.brought, "copies that nobody waits for"
                assert not machine.taken, "a program ends before its results are written"

        return launch


def in_torch(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        span = sum((size - 1) * stride for size, stride in zip(given.shape, given.stride(), strict=True)) + 1
        return Pointer(given.as_strided((span,), (1,)))
    if hasattr(given, "block_shape"):
        rows, columns = given.block_shape
        return Described(given.base, (rows, columns))
    return given


def planned(ids: torch.Tensor, num_experts: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``triton_plan.plan`` makes, for blocks of 128 rows."""
    order, block_expert = torch.full((blocks * 128,), -1), torch.full((blocks,), -1)
    block = 0
    for expert in range(num_experts):
        for own in (ids.flatten() == expert).nonzero().flatten().split(128):
            order[block * 128 : block * 128 + len(own)] = own
            block_expert[block] = expert
            block += 1
    return order, block_expert


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("limit", [None, LIMIT])
def test_each_pair_goes_through_its_expert(seed: int, limit: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert of two blocks, the second of which has rows for one group alone, one of few rows, one of none, pairs
    without an expert, blocks that nobody needs, and a shared expert whose last rows are no tokens."""
    gen = torch.Generator().manual_seed(seed)
    T, H, inner, top_k, num_experts = 150, 512, 384, 2, 4

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen).bfloat16()

    x = torch.full((T, H + 16), torch.nan, dtype=torch.bfloat16)[:, :H].copy_(draw(T, H))
    w13, w2 = draw(num_experts + 1, 2 * inner, H) * H**-0.5, draw(num_experts + 1, H, inner) * inner**-0.5
    ids = torch.zeros(T, top_k, dtype=torch.int64)
    ids[:, 1] = torch.where(torch.arange(T) < 100, 3, 2)
    ids[140:, 0], ids[-3:] = 3, -1
    routed = (T * top_k + num_experts * 127) // 128
    where = (*planned(ids, num_experts, routed), T, routed, 2, num_experts)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **named: empty(*size, **named).fill_(torch.nan))
    monkeypatch.setattr(roles, "_PROGRAMS", PROGRAMS)
    monkeypatch.setattr(roles, "products", Launched(10 * seed))
    got = roles.partial_sums(x, w13, w2, where, blocks=routed + 2, top_k=top_k, swiglu_limit=limit)
    experts = torch.cat([ids.flatten(), torch.full((T,), num_experts)])
    rows = torch.cat([x.repeat_interleave(top_k, 0), x]).float()
    for expert in range(num_experts + 1):
        own = experts == expert
        hidden = reference.swiglu(rows[own] @ w13[expert].float().T, limit=limit).bfloat16().float()
        want = hidden @ w2[expert].float().T
        torch.testing.assert_close(got[own].float(), want, rtol=BF16_STEPS, atol=BF16_STEPS)
    assert bool(got[experts < 0].isnan().all()), "a pair without an expert has no result"
