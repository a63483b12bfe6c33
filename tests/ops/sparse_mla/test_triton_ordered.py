"""The ordered attention kernel, its own source run on a CPU with torch in the place of Gluon's language.

Gluon has no interpreter. This one knows nothing of threads, so it says nothing about barriers; it does catch wrong
places, masks and scales, rows used before their copy was waited for, and memory overwritten under an open product.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sidestream.ops.kv_rows import KVRowLayout, kv_row_layout
from sidestream.ops.sparse_mla import reference
from tests.ops.sparse_mla.test_sparse_mla import draw_rows, poisoned
from tests.tolerances import BF16_STEPS

triton_ordered = pytest.importorskip("sidestream.ops.sparse_mla.triton_ordered")

SCALE, LATENT = 0.08, 512


@pytest.fixture(autouse=True)
def bit_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """``tensor.to(dtype, bitcast=True)`` as the language has it."""
    convert = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, bitcast: bool = False, **kwargs: Any) -> torch.Tensor:
        return tensor.view(args[0]) if bitcast else convert(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)


class Pointer:
    """Places in one flat memory."""

    def __init__(self, memory: torch.Tensor, place: Any = 0) -> None:
        self.memory, self.place = memory.reshape(-1), torch.as_tensor(place)
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.place + offset)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, self.place[index])

    def load(self, mask: torch.Tensor | None, other: float) -> torch.Tensor:
        place = self.place.long()
        if mask is None:
            return self.memory[place]
        mask = mask.broadcast_to(place.shape)
        raw = self.memory.view(torch.uint8) if self.memory.element_size() == 1 else self.memory
        found = torch.where(mask, raw[torch.where(mask, place, 0)], torch.tensor(other, dtype=raw.dtype))
        return found.view(self.memory.dtype)


class Shared:
    """Shared memory; products see it as it is, copies write it when they are waited for."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def index(self, i: int) -> Shared:
        return Shared(self.data[i])

    def permute(self, order: tuple[int, int]) -> Shared:
        return Shared(self.data.permute(order))

    def store(self, value: torch.Tensor) -> None:
        assert value.dtype is self.data.dtype
        self.data.copy_(value)

    def load(self, layout: object) -> torch.Tensor:
        return self.data.clone()


class Open:
    """A product that has been started: its value, and what it must still find in memory when it is waited for."""

    def __init__(self, value: torch.Tensor, reads: list[tuple[Shared, torch.Tensor]]) -> None:
        self.value, self.reads = value, reads


class Machine:
    """One program at a time."""

    def __init__(self) -> None:
        self.program = (0, 0)
        self.copies: list[Callable[[], Any]] = []
        self.open = 0

    def copy(self, target: Shared, source: Pointer, mask: torch.Tensor) -> None:
        target.data.view(torch.uint8).fill_(0xFF)  # NaN in every format
        self.copies.append(lambda: target.data.copy_(source.load(mask, 0)))

    def wait_copies(self, outstanding: int) -> None:
        assert outstanding == 0
        for copy in self.copies:
            copy()
        self.copies.clear()

    def product(self, a: Shared, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Open:
        assert is_async
        self.open += not isinstance(acc, Open)
        assert self.open == 1, "a product starts while another one is open"
        reads = acc.reads if isinstance(acc, Open) else []
        before = acc.value if isinstance(acc, Open) else acc
        value = a.data.float() @ b.data.float()
        return Open(value + before if use_acc else value, [*reads, (a, a.data.clone()), (b, b.data.clone())])

    def wait_product(self, outstanding: int, deps: list[Open]) -> torch.Tensor:
        assert outstanding == 0
        self.open = 0
        for memory, seen in deps[0].reads:
            assert torch.equal(memory.data, seen), "memory changed, or held NaN, under an open product"
        return deps[0].value


def language(machine: Machine) -> dict[str, Any]:
    """Names that the module's functions use."""

    def layout(*_args: Any, **_kwargs: Any) -> None:
        return None

    def allocate(dtype: Any, shape: list[int], _layout: Any, value: torch.Tensor | None = None) -> Shared:
        if value is not None:
            return Shared(value.clone())
        return Shared(torch.full([*shape], 0xFF, dtype=torch.uint8).repeat_interleave(dtype.itemsize, -1).view(dtype))

    def store(target: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
        mask = mask.broadcast_to(target.place.shape)
        target.memory[target.place.long()[mask]] = value[mask]

    gl = types.SimpleNamespace(
        **{name: getattr(torch, name) for name in ("int32", "int64", "float32", "bfloat16", "exp2", "log2", "where")},
        **{name: getattr(torch, name) for name in ("maximum", "minimum", "reshape")},
        BlockedLayout=layout,
        SliceLayout=layout,
        SwizzledSharedLayout=layout,
        NVMMADistributedLayout=layout,
        NVMMASharedLayout=types.SimpleNamespace(get_default_for=layout),
        allocate_shared_memory=allocate,
        arange=lambda first, end, layout: torch.arange(first, end),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        cdiv=lambda a, b: -(-a // b),
        max=lambda x, axis: x.amax(axis),
        sum=lambda x, axis: x.sum(axis),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        thread_barrier=lambda: None,
        program_id=lambda axis: torch.tensor(machine.program[axis]),
        load=lambda source, mask=None, other=0: source.load(mask, other),
        store=store,
    )
    copies = types.SimpleNamespace(
        async_copy_global_to_shared=machine.copy, commit_group=lambda: None, wait_group=machine.wait_copies
    )
    names: dict[str, Any] = {
        "gl": gl,
        "async_copy": copies,
        "fence_async_shared": lambda: None,
        "warpgroup_mma": machine.product,
        "warpgroup_mma_wait": machine.wait_product,
        "gdc_launch_dependents": lambda: None,
        "_LN2": math.log(2),
    }
    for name in ("_pool_rows", "_copy_rows", "_unpack", "_online_softmax", "attend_ordered"):
        names[name] = types.FunctionType(getattr(triton_ordered, name).fn.__code__, names, name)
    return names


def run(
    q: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    layout: KVRowLayout,
    *,
    splits: int,
    block_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, splits, H, latent] and lse [T, splits, H] fp32, NaN where nothing was written."""
    tokens, heads, _ = q.shape
    values, scales, ropes = pool, pool, pool
    if layout.tile:
        values = pool.view(torch.float8_e4m3fn)
        scales = pool if layout.name == "mxfp8" else pool.view(torch.float32)
        ropes = pool.view(torch.bfloat16) if layout.rope_dim else pool
    out = torch.full((tokens, splits, heads, LATENT), torch.nan)
    lse = torch.full((tokens, splits, heads), torch.nan)
    machine, head_blocks = Machine(), -(-heads // 64)
    names = language(machine)
    for place in range(tokens * head_blocks):
        for split in range(splits):
            machine.program = (place, split)
            names["attend_ordered"](
                *(Pointer(memory) for memory in (q, values, scales, ropes, rows, lengths, out, lse)),
                *(q.stride(0), q.stride(1), rows.stride(0), SCALE / math.log(2), heads, head_blocks),
                *(block_size, splits, LATENT, layout.rope_dim, values.shape[1], ropes.shape[1], layout.tile),
                *(layout.name == "mxfp8", splits == 1, block_size > 0, True),
            )
    return out, lse


def merged(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs that hold nothing are not read."""
    whole = lse.logsumexp(1)
    weight = torch.where(lse.isinf(), 0.0, (lse - whole[:, None]).exp())
    return torch.where(weight[..., None] > 0, out * weight[..., None], 0.0).sum(1), whole


LAYOUTS = [("bf16", 0), ("bf16", 64), ("fp8_ds_mla", 64), ("fp8_ds_mla", 0), ("mxfp8", 0)]


@pytest.mark.parametrize(("name", "p"), LAYOUTS)
@pytest.mark.parametrize("splits", [1, 2])
def test_equals_the_reference(name: str, p: int, splits: int) -> None:
    layout = kv_row_layout(name, latent_dim=LATENT, rope_dim=p, model_dtype=torch.bfloat16)
    rows, counts = draw_rows(4, 200, [200, 0, 1, 130])
    pool, q = poisoned(layout, rows), torch.randn(4, 70, LATENT + p).bfloat16()
    out, lse = merged(*run(q, pool, rows, counts, layout, splits=splits))
    some = [0, 1, 63, 64, 69]
    want, want_lse = reference.sparse_mla(q[:, some], pool, rows, counts=counts, scale=SCALE, layout=layout)
    assert not out.isnan().any()
    assert (out[:, some] - want).norm(dim=2).le(BF16_STEPS * want.norm(dim=2)).all()
    assert torch.equal(lse[1].isinf(), torch.ones(70, dtype=torch.bool))
    assert (lse[:, some] - want_lse)[counts > 0].abs().max() <= BF16_STEPS


def test_rows_from_a_block_table() -> None:
    layout = kv_row_layout("bf16", latent_dim=LATENT, rope_dim=64, model_dtype=torch.bfloat16)
    table = torch.tensor([[3, 1, 4], [7, 0, 0], [0, 0, 0]])
    lengths, block = torch.tensor([150, 9, 0]), 64
    pool = torch.full((8 * block, LATENT + 64), torch.nan, dtype=torch.bfloat16)
    listed = torch.full((3, 150), -1)
    for t, length in enumerate(lengths.tolist()):
        place = torch.arange(length)
        listed[t, :length] = table[t, place // block] * block + place % block
        pool[listed[t, :length]] = torch.randn(length, LATENT + 64).bfloat16()
    q = torch.randn(3, 2, LATENT + 64).bfloat16()
    got = run(q, pool, table, lengths, layout, splits=1, block_size=block)
    want = run(q, pool, listed, lengths, layout, splits=1)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not got[0].isnan().any()
