"""The attention kernel of warps with roles, its own source run on a CPU with torch in the place of Gluon's language.

See ``tests.ops.gluon_in_torch`` for what this catches. A fence is wanted between rows' unpacking and their products,
and barriers between threads of a role.
"""

from __future__ import annotations

import math
import threading
import types
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sidestream.ops.dense_mla import reference as dense_reference
from sidestream.ops.kv_rows import KVRowLayout, kv_row_layout, unpack_rows
from sidestream.ops.sparse_mla import reference
from tests.ops.gluon_in_torch import Machine, Pointer, Shared, Sum, allocate, functions_of, language, with_functions
from tests.ops.paged import make_paged
from tests.ops.sparse_mla.test_sparse_mla import draw_rows, poisoned
from tests.tolerances import BF16_STEPS, FP32_GEMM

triton_gather = pytest.importorskip("sidestream.ops.sparse_mla.triton_gather")
triton_gather_quantised = pytest.importorskip("sidestream.ops.sparse_mla.triton_gather_quantised")
triton_roles = pytest.importorskip("sidestream.ops.sparse_mla.triton_roles")

SCALE, LATENT = 0.08, 512


@pytest.fixture(autouse=True)
def bit_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """``tensor.to(dtype, bitcast=True)`` as the language has it."""
    convert = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, bitcast: bool = False, **kwargs: Any) -> torch.Tensor:
        return tensor.view(args[0]) if bitcast else convert(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)


class Watched(Shared):
    """Shared memory whose loads and stores the machine is told of: threads of a role do not run in step."""

    def __init__(self, data: torch.Tensor, machine: Gathering) -> None:
        super().__init__(data)
        self.machine = machine

    def index(self, i: int) -> Shared:
        return Watched(self.data[i], self.machine)

    def slice(self, start: int, length: int) -> Shared:
        return Watched(self.data[start : start + length], self.machine)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
        return Watched(super()._reinterpret(dtype, shape, layout).data, self.machine)

    def store(self, value: torch.Tensor) -> None:
        self.machine.stored(self)
        super().store(value)

    def load(self, layout: object) -> torch.Tensor:
        self.machine.loaded(self)
        return super().load(layout)


def span_of(memory: Shared) -> range:
    """Addresses."""
    first = memory.data.data_ptr()
    return range(first, first + memory.data.numel() * memory.data.itemsize)


class Gathering(Machine):
    """Roles that gather rows by asynchronous copies; what threads write needs a fence before products. What some
    threads of a role store others may load behind a barrier only, and the other way round, but for memory whose layout
    is ``"own"``: each thread has a part of it for itself."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.loads, self.stores = defaultdict[int, list[range]](list), defaultdict[int, list[range]](list)
        self.copies: list[Callable[[], Any]] = []
        self.groups: deque[list[Callable[[], Any]]] = deque()
        self.unordered: set[int] = set()

    def fence(self) -> None:
        self.unordered.discard(threading.get_ident())

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
        memory = allocate(dtype, shape, layout)
        return memory if layout == "own" else Watched(memory.data, self)

    def loaded(self, memory: Shared) -> None:
        span, me = span_of(memory), threading.get_ident()
        fresh = any(span[0] <= other[-1] and other[0] <= span[-1] for other in self.stores[me])
        assert not fresh, "threads load what others stored, without a barrier between"
        self.loads[me].append(span)

    def stored(self, memory: Shared, *, arrives: bool = True) -> None:
        span, me = span_of(memory), threading.get_ident()
        wanted = any(span[0] <= other[-1] and other[0] <= span[-1] for other in self.loads[me])
        assert not wanted, "threads store where others may still load, without a barrier between"
        if arrives:
            self.stores[me].append(span)

    def line_up(self) -> None:
        self.loads.pop(threading.get_ident(), None)
        self.stores.pop(threading.get_ident(), None)

    def arrive(self, barrier: Shared, *, count: int, pred: bool = True) -> None:
        me = threading.get_ident()
        assert count > 1 or not (self.loads[me] or self.stores[me]), "one thread arrives for all without a barrier"
        super().arrive(barrier, count=count, pred=pred)

    def copy(self, target: Shared, source: Pointer, mask: torch.Tensor) -> None:
        watched = isinstance(target, Watched)
        if watched:
            self.stored(target, arrives=False)
        target.data.view(torch.uint8).fill_(0xFF)  # NaN in every format

        def arrive() -> None:
            if watched:
                self.stored(target)
            target.data.copy_(source.load(mask))

        self.copies.append(arrive)

    def commit_copies(self) -> None:
        self.groups.append(self.copies)
        self.copies = []

    def wait_copies(self, outstanding: int) -> None:
        while len(self.groups) > outstanding:
            for copy in self.groups.popleft():
                copy()

    def copies_arrive(self, barrier: Shared, *, increment_count: bool) -> None:
        assert not increment_count
        self.commit_copies()
        self.wait_copies(0)
        self.arrive(barrier, count=128)

    def wait(self, barrier: Shared, phase: int) -> None:
        super().wait(barrier, phase)
        self.unordered.add(threading.get_ident())

    def product(self, a: Shared, b: Shared, acc: Any, **how: bool) -> Sum:
        fenced = threading.get_ident() not in self.unordered
        assert fenced, "a product without a fence behind the barrier that its operands passed"
        return super().product(a, b, acc, **how)

    def wait_product(self, outstanding: int, deps: list[Sum]) -> Any:
        assert outstanding == 0
        return super().wait_product(outstanding, deps)


def unpacked(asm: str, _constraints: str, given: list[torch.Tensor], *_: Any, **__: Any) -> Any:
    """What the assembler text says: four E4M3 values of a word, scaled, as two words of two bf16. A scale is fp32 or,
    an integer, two bf16."""
    words, scale = torch.broadcast_tensors(*given)
    values = words.contiguous().view(torch.uint8).view(*words.shape, 4).view(torch.float8_e4m3fn).float()
    assert (scale.dtype is torch.int32) == (asm == "pairs")
    if asm == "pairs":
        scales = scale.contiguous().view(torch.bfloat16).view(*scale.shape, 2).repeat(*(1,) * scale.dim(), 2)
        pairs = (values.bfloat16() * scales).view(torch.int32)
    else:
        pairs = (values * scale[..., None]).bfloat16().view(torch.int32)
    return pairs[..., 0], pairs[..., 1]


def names_of(machine: Gathering, program: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """Names that the module's functions use."""
    copies = types.SimpleNamespace(
        async_copy_global_to_shared=machine.copy,
        commit_group=machine.commit_copies,
        wait_group=machine.wait_copies,
        mbarrier_arrive=machine.copies_arrive,
    )
    names: dict[str, Any] = {
        "gl": language(
            program,
            inline_asm_elementwise=unpacked,
            warp_specialize=machine.specialize,
            allocate_shared_memory=machine.allocate,
            thread_barrier=machine.line_up,
        ),
        "async_copy": copies,
        "mbarrier": machine.mbarrier,
        "fence_async_shared": machine.fence,
        "warpgroup_mma": machine.product,
        "warpgroup_mma_wait": machine.wait_product,
        "gdc_launch_dependents": lambda: None,
        "gdc_wait": lambda: None,
        "_LN2": math.log(2),
        "_PLAIN_REGISTERS": (0, 0),
        "_MXFP8_REGISTERS": (0, 0),
        "_FP8_REGISTERS": (0, 0),
        "_UNPACK": "fp32",
        "_UNPACK_PAIRS": "pairs",
        "_SHORT_TILES": None,
        "_SHORT_STAGE": "own",
        "_STAGES": 3,
        "_LONG_TILES": None,
    }
    modules = (triton_gather, triton_gather_quantised, triton_roles)
    return with_functions(names, [function for module in modules for function in functions_of(module)])


def run(
    q: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    layout: KVRowLayout,
    *,
    splits: int,
    block_n: int = 64,
    block_size: int = 0,
    chunk_start: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, splits, H, latent] and lse [T, splits, H] fp32, NaN where nothing was written."""
    tokens, heads, _ = q.shape
    values, scales, ropes = pool, pool, pool
    if layout.tile:
        values = pool.view(torch.int32)
        scales = pool if layout.name == "mxfp8" else pool.view(torch.float32)
        ropes = pool.view(torch.bfloat16) if layout.rope_dim else pool
    out = torch.full((tokens, splits, heads, LATENT), torch.nan)
    lse = torch.full((tokens, splits, heads), torch.nan)
    causal = chunk_start is not None
    head_blocks = -(-heads // 64)
    for place in range(-(-tokens * heads // 64) if causal else tokens * head_blocks):
        for split in range(splits):
            names_of(Gathering(seed=place * splits + split), (place, split))["attend_roles"](
                *(Pointer(memory) for memory in (q, values, scales, ropes, rows, lengths, out, lse)),
                *(q.stride(0), q.stride(1), rows.stride(0), SCALE / math.log(2), heads, head_blocks),
                *(block_size, splits, tokens, chunk_start or 0, LATENT, layout.rope_dim, layout.row_elems),
                *(
                    ropes.shape[1],
                    layout.tile,
                    layout.name == "mxfp8",
                    splits == 1,
                    block_size > 0,
                    causal,
                    block_n,
                    True,
                    False,
                ),
            )
    return out, lse


def merged(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs that hold nothing are not read."""
    whole = lse.logsumexp(1)
    weight = torch.where(lse.isinf(), 0.0, (lse - whole[:, None]).exp())
    return torch.where(weight[..., None] > 0, out * weight[..., None], 0.0).sum(1), whole


FORMS = [
    *(("bf16", p, block_n) for p in (0, 64) for block_n in (64, 32)),
    *(("fp8_ds_mla", p, 64) for p in (64, 0)),
    ("mxfp8", 0, 64),
]
"""Row formats, sizes of rope keys, rows a tile."""


@pytest.mark.parametrize(("name", "p", "block_n"), FORMS)
@pytest.mark.parametrize("splits", [1, 2])
def test_equals_the_reference(name: str, p: int, block_n: int, splits: int) -> None:
    layout = kv_row_layout(name, latent_dim=LATENT, rope_dim=p, model_dtype=torch.bfloat16)
    rows, counts = draw_rows(4, 280, [280, 0, 1, 130])
    pool, q = poisoned(layout, rows), torch.randn(4, 70, LATENT + p).bfloat16()
    out, lse = merged(*run(q, pool, rows, counts, layout, splits=splits, block_n=block_n))
    some = [0, 1, 63, 64, 69]
    want, want_lse = reference.sparse_mla(q[:, some], pool, rows, counts=counts, scale=SCALE, layout=layout)
    assert not out.isnan().any()
    assert (out[:, some] - want).norm(dim=2).le(BF16_STEPS * want.norm(dim=2)).all()
    assert torch.equal(lse[1].isinf(), torch.ones(70, dtype=torch.bool))
    assert (lse[:, some] - want_lse)[counts > 0].abs().max() <= BF16_STEPS


@pytest.mark.parametrize(("name", "p", "block_n"), FORMS[4:])
@pytest.mark.parametrize("splits", [1, 3])
def test_unpacked_rows_have_the_bits_that_their_format_says(name: str, p: int, block_n: int, splits: int) -> None:
    """All rows of a token are the same one, and its queries are zeros: so it finds that row. Scales of neighbours lie
    far apart."""
    layout = kv_row_layout(name, latent_dim=LATENT, rope_dim=p, model_dtype=torch.bfloat16)
    counts = torch.tensor([1, 63, 150, 65], dtype=torch.int32)
    rows = torch.full((4, 150), -1)
    for t, count in enumerate(counts.tolist()):
        rows[t, :count] = 2 + 3 * t
    pool = poisoned(layout, rows)
    used = rows[:, 0]
    scale = torch.arange(4 * layout.num_scales).view(4, layout.num_scales) * 29 % 61
    if name == "mxfp8":
        pool[used, LATENT:] = (scale + 100).byte()
    else:
        pool.view(torch.float32)[used, LATENT // 4 : LATENT // 4 + 4] = 1.37 * 2.0 ** (scale - 30)
    q = torch.zeros(4, 3, LATENT + p).bfloat16()
    out, lse = merged(*run(q, pool, rows, counts, layout, splits=splits, block_n=block_n))
    want = unpack_rows(pool[used], layout, dtype=torch.bfloat16)[:, None, :LATENT]
    assert torch.equal(out.bfloat16(), want.expand(4, 3, LATENT))
    assert (lse - counts.log()[:, None]).abs().max() <= FP32_GEMM


def test_products_in_pairs_equal_those_in_fp32() -> None:
    """Every byte times every scale that rows are packed with: subnormal numbers, what overflows and NaN included."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    unpack = names_of(Gathering(0))["_unpack_mxfp8"]
    scales = codes.view(torch.float8_e8m0fnu).float().view(256, 1)
    for first in range(0, 256, 32):
        values = torch.arange(first, first + 32, dtype=torch.uint8)
        got = unpack(values.view(torch.int32).expand(16, 16, 8), codes).view(torch.bfloat16).reshape(256, 32)[1:]
        want = (values.view(torch.float8_e4m3fn).float() * scales).bfloat16()[1:]
        assert torch.equal(want.isnan(), got.isnan())
        assert torch.equal(want.nan_to_num(), got.nan_to_num())


@pytest.mark.parametrize(("name", "p", "block_n"), FORMS)
def test_rows_from_a_block_table(name: str, p: int, block_n: int) -> None:
    layout = kv_row_layout(name, latent_dim=LATENT, rope_dim=p, model_dtype=torch.bfloat16)
    table = torch.tensor([[3, 1, 2], [4, 0, 0], [0, 0, 0]])
    lengths, block = torch.tensor([150, 9, 0]), 64
    listed = torch.full((3, 150), -1)
    for t, length in enumerate(lengths.tolist()):
        place = torch.arange(length)
        listed[t, :length] = table[t, place // block] * block + place % block
    pool = poisoned(layout, listed)
    q = torch.randn(3, 2, LATENT + p).bfloat16()
    got = run(q, pool, table, lengths, layout, splits=1, block_n=block_n, block_size=block)
    want = run(q, pool, listed, lengths, layout, splits=1, block_n=block_n)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not got[0].isnan().any()


@pytest.mark.parametrize(("heads", "chunk", "start"), [(32, 5, 130), (20, 10, 0), (128, 2, 61)])
@pytest.mark.parametrize(("splits", "block_n"), [(1, 64), (3, 64), (3, 32)])
def test_a_chunk_of_a_sequence(heads: int, chunk: int, start: int, splits: int, block_n: int) -> None:
    layout = kv_row_layout("bf16", latent_dim=LATENT, rope_dim=64, model_dtype=torch.bfloat16)
    paged = make_paged([(start, chunk)], block_size=32)
    pool, q = paged.poisoned_pool(LATENT + 64, torch.bfloat16), torch.randn(chunk, heads, LATENT + 64).bfloat16()
    none = torch.zeros(1, dtype=torch.int32)
    sizes = {"splits": splits, "block_n": block_n, "block_size": 32}
    out, lse = merged(*run(q, pool, paged.block_table, none, layout, **sizes, chunk_start=start))
    some = [0, heads - 1]
    want, want_lse = dense_reference.dense_mla(
        q[:, some],
        pool,
        block_table=paged.block_table,
        segments=paged.segments,
        num_decode=0,
        block_size=32,
        scale=SCALE,
        layout=layout,
    )
    assert not out.isnan().any()
    assert (out[:, some] - want).norm(dim=2).le(BF16_STEPS * want.norm(dim=2)).all()
    assert (lse[:, some] - want_lse).abs().max() <= BF16_STEPS
