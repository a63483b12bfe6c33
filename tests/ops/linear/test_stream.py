"""The linear of 2 to 64 rows by warps with roles, its own source run on a CPU: see ``tests.ops.gluon_in_torch``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from sidestream.ops.linear import reference
from sidestream.ops.linear.launches import Stream
from tests.ops.gluon_in_torch import Front, Machine, Pointer, Shared, functions_of, language, with_functions
from tests.tolerances import BF16_OUTPUT, FP32_GEMM

triton_stream = pytest.importorskip("sidestream.ops.linear.triton_stream")

FUNCTIONS = functions_of(triton_stream)


class CopyEngine(Machine):
    """Brings boxes of matrices to shared memory, in any order and when it likes."""

    def __init__(self, seed: int, launch: Stream, front: Front) -> None:
        super().__init__(seed, sums=launch.groups, engine=self.land)
        self.front, self.unfenced = front, False
        self.flying: list[tuple[Callable[[], torch.Tensor], torch.Tensor, Shared, Shared]] = []
        self.ahead = self.released = 0

    def init(self, barrier: Shared, *, count: int) -> None:
        super().init(barrier, count=count)
        self.unfenced = True

    def fence(self) -> None:
        self.unfenced = False

    def expect(self, barrier: Shared, bytes: int) -> None:
        self.barrier(barrier).arrive(1, bytes=bytes)

    def copy(self, source: Any, at: list[Any], barrier: Shared, target: Shared) -> None:
        assert not self.unfenced, "the copy engine may not see the barriers yet"
        read = partial(box, source, int(at[0]), int(at[1]))
        assert target.data.shape == tuple(source.block_shape)
        target.data.fill_(torch.nan)
        self.flying.append((read, read(), barrier, target))
        self.ahead += bool(self.front.coming)
        self.roles.pause()

    def land(self) -> bool:
        """One of the copies on their way, whichever."""
        if not self.flying:
            return False
        read, seen, barrier, target = self.flying.pop(self.roles.random.randrange(len(self.flying)))
        assert torch.equal(read(), seen), "read while it may still be written"
        assert target.data.isnan().all(), "written while a copy is on its way there"
        target.data.copy_(seen)
        self.barrier(barrier).arrive(bytes=-seen.nbytes)
        return True

    def store(self, target: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
        assert not self.front.coming, "written before the kernel in front has ended"
        target.store(value, mask)

    def release(self) -> None:
        self.released += 1


def box(source: Any, row: int, column: int) -> torch.Tensor:
    """What a descriptor has there, zero beyond its bounds."""
    height, width = source.block_shape
    known = source.base[row : row + height, column : column + width]
    found = torch.zeros(height, width, dtype=known.dtype)
    found[: known.shape[0], : known.shape[1]] = known
    return found


class Kernel:
    """Stands for ``_stream``: a launch runs its programs one after the other. ``faulty`` changes a machine's names."""

    def __init__(self, seed: int, faulty: Callable[[CopyEngine, dict[str, Any]], None] | None = None) -> None:
        self.seed, self.faulty = seed, faulty

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        return partial(self.run, grid)

    def run(self, grid: tuple[int, int], x: Any, weight: Any, bias: Any, out: Any, *sizes: int, **how: Any) -> None:
        launch_pdl, warps = how.pop("launch_pdl", False), how.pop("num_warps")
        assert (launch_pdl, warps) == (how["early"], 4)
        launch = Stream(how["rows"], how["groups"], sizes[2], grid[1], early=how["early"])
        out.fill_(torch.nan)
        for program in ((n, part) for n in range(grid[0]) for part in range(grid[1])):
            front = Front([x.base] if launch.early else [])
            machine = CopyEngine(self.seed * 1000 + program[0] * grid[1] + program[1], launch, front)
            names = names_of(machine, program)
            if self.faulty is not None:
                self.faulty(machine, names)
            names["_stream"](x, weight, Pointer(bias), Pointer(out), *sizes, **how)
            assert not machine.flying, "a program ends while copies to its memory are on their way"
            assert not front.coming, "the kernel in front was not waited for"
            assert machine.ahead == (launch.stages * launch.groups if launch.early else 0)
            assert machine.released == launch.early


def names_of(machine: CopyEngine, program: tuple[int, int]) -> dict[str, Any]:
    """Names that the module's functions use."""
    mbarrier = machine.mbarrier
    mbarrier.expect = machine.expect
    names: dict[str, Any] = {
        "gl": language(program, warp_specialize=machine.specialize, store=machine.store),
        "mbarrier": mbarrier,
        "tma": type("tma", (), {"async_copy_global_to_shared": machine.copy}),
        "fence_async_shared": machine.fence,
        "warpgroup_mma": machine.product,
        "warpgroup_mma_wait": machine.wait_product,
        "gdc_launch_dependents": machine.release,
        "gdc_wait": machine.front.wait,
    }
    return with_functions(names, FUNCTIONS)


def sum_parts(parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, early: bool) -> None:
    out.copy_(sum(parts[1:], parts[0]) + (0 if bias is None else bias.float()))


def run(
    monkeypatch: pytest.MonkeyPatch,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    launch: Stream,
    *,
    dtype: torch.dtype = torch.bfloat16,
    kernel: Kernel | None = None,
) -> torch.Tensor:
    """The module's own ``linear`` over it, with NaN between rows of x and behind the results."""
    size = x.shape[0] * weight.shape[0]
    memory = torch.full((size + 64,), torch.nan, dtype=dtype)
    wide = torch.full((x.shape[0] + 1, x.shape[1] + 8), torch.nan, dtype=x.dtype)
    given, out = wide[:-1, : x.shape[1]], memory[:size].view(x.shape[0], -1)
    given.copy_(x)
    monkeypatch.setattr(triton_stream, "_stream", kernel or Kernel(x.shape[0]))
    monkeypatch.setattr(triton_stream, "sum_parts", sum_parts)
    assert triton_stream.linear(given, weight, bias, launch=launch, out=out) is out
    assert memory[size:].isnan().all(), "written behind the last row"
    return out


def drawn(rows: int, out_features: int, in_features: int) -> tuple[torch.Tensor, ...]:
    weight = (torch.randn(out_features, in_features) / in_features**0.5).bfloat16()
    return torch.randn(rows, in_features).bfloat16(), weight, torch.randn(out_features).bfloat16()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("launch", "out_features", "rows"),
    [
        (Stream(16, 1, 45), 130, 2),  # more than twice as many steps as stages
        (Stream(16, 4, 12), 520, 15),
        (Stream(16, 2, 11, splits=2), 200, 16),  # as many steps as stages
        (Stream(16, 3, 1), 192, 3),  # a single step
        (Stream(32, 3, 16, early=False), 70, 17),  # groups of 64 rows that are beyond the last
        (Stream(32, 2, 10, splits=4), 129, 32),
        (Stream(64, 4, 5), 256, 33),
        (Stream(64, 4, 13), 300, 64),
        (Stream(64, 1, 14, splits=2, early=False), 64, 64),
    ],
)
def test_equals_the_formula(
    launch: Stream, out_features: int, rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, given = drawn(rows, out_features, launch.steps * launch.splits * 64)
    got = run(monkeypatch, x, weight, given if bias else None, launch)
    want = reference.linear(x, weight, given if bias else None)
    torch.testing.assert_close(got.float(), want, rtol=BF16_OUTPUT, atol=FP32_GEMM)


def test_whatever_the_order_of_roles_and_copies_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Stream(16, 4, 13)
    x, weight, _ = drawn(5, 256, 13 * 64)
    first, *others = (run(monkeypatch, x, weight, None, launch, kernel=Kernel(seed)) for seed in range(20))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("splits", [1, 2])
def test_wide_results_are_the_sums_themselves(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = drawn(16, 70, 512)
    got = run(monkeypatch, x, weight, None, Stream(16, 2, 8 // splits, splits), dtype=torch.float32)
    torch.testing.assert_close(got, reference.linear(x, weight, None), rtol=0.0, atol=FP32_GEMM)


def _no_wait(machine: CopyEngine, names: dict[str, Any]) -> None:
    names["gdc_wait"] = lambda: None


def _too_many_open(machine: CopyEngine, names: dict[str, Any]) -> None:
    names["warpgroup_mma_wait"] = lambda open, deps: machine.wait_product(open and open + len(deps), deps)


def _full_at_once(machine: CopyEngine, names: dict[str, Any]) -> None:
    machine.wait = lambda barrier, phase: machine.roles.pause()  # type: ignore[method-assign]
    names["mbarrier"].wait = machine.wait


def _never_empty(machine: CopyEngine, names: dict[str, Any]) -> None:
    names["mbarrier"].arrive = lambda barrier, *, count, pred: machine.roles.pause()


def _not_fenced(machine: CopyEngine, names: dict[str, Any]) -> None:
    names["fence_async_shared"] = lambda: None


FAULTS = {
    "read while it may still be written": _no_wait,
    "under an open product": _too_many_open,
    "(under an open product|on its way|more arrivals)": _full_at_once,
    "every role waits": _never_empty,
    "may not see the barriers": _not_fenced,
}


@pytest.mark.parametrize("said", FAULTS)
def test_a_fault_is_found(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that equal results mean something: each order of the kernel left out."""
    x, weight, _ = drawn(16, 256, 20 * 64)

    def five_times() -> None:
        for seed in range(5):
            run(monkeypatch, x, weight, None, Stream(16, 4, 20), kernel=Kernel(seed, FAULTS[said]))

    with pytest.raises(AssertionError, match=said):
        five_times()
