"""The attention kernel of warps with roles, its own source run on a CPU with torch in the place of Gluon's language.

Gluon has no interpreter. In this one each role is a thread, one runs at a time, and which one goes on at a barrier is
drawn from a seed. It knows nothing of the warps in a role; it does catch wrong places, masks and scales, roles that
wait for each other, rows used before they are there or without a fence, and memory overwritten under an open product.
"""

from __future__ import annotations

import math
import random
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sidestream.ops.dense_mla import reference as dense_reference
from sidestream.ops.kv_rows import KVRowLayout, kv_row_layout
from sidestream.ops.sparse_mla import reference
from tests.ops.paged import make_paged
from tests.ops.sparse_mla.test_sparse_mla import draw_rows, poisoned
from tests.tolerances import BF16_STEPS

triton_gather = pytest.importorskip("sidestream.ops.sparse_mla.triton_gather")
triton_gather_staged = pytest.importorskip("sidestream.ops.sparse_mla.triton_gather_staged")
triton_roles = pytest.importorskip("sidestream.ops.sparse_mla.triton_roles")

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

    def load(self, mask: torch.Tensor | None, other: float) -> torch.Tensor:
        place = self.place.long()
        if mask is None:
            return self.memory[place]
        mask = mask.broadcast_to(place.shape)
        return torch.where(mask, self.memory[torch.where(mask, place, 0)], torch.tensor(other, dtype=self.memory.dtype))


class Shared:
    """Shared memory; products see it as it is, copies write it when they are waited for."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def index(self, i: int) -> Shared:
        return Shared(self.data[i])

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.data[start : start + length])

    def permute(self, order: tuple[int, int]) -> Shared:
        return Shared(self.data.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], _layout: object) -> Shared:
        return Shared(self.data.view(-1).view(dtype)[: math.prod(shape)].view(shape))

    def store(self, value: torch.Tensor) -> None:
        assert value.dtype is self.data.dtype
        assert value.shape == self.data.shape
        self.data.copy_(value)

    def load(self, layout: object) -> torch.Tensor:
        return self.data.clone()


class Open:
    """A product that has been started: its value, and what it must still find in memory when it is waited for."""

    def __init__(self, value: torch.Tensor, reads: list[tuple[Shared, torch.Tensor]]) -> None:
        self.value, self.reads = value, reads


class Roles:
    """Threads of which one runs at a time; who goes on where one could wait is drawn."""

    def __init__(self, seed: int) -> None:
        self.random, self.turns, self.failures = random.Random(seed), threading.Condition(), list[BaseException]()
        self.waits: dict[int, Callable[[], bool]] = {}
        self.running: int | None = None

    def _choose(self) -> None:
        ready = [role for role, wait in self.waits.items() if wait()]
        assert ready or not self.waits or self.failures, "every role waits"
        self.running = self.random.choice(ready or [*self.waits, -1])
        self.turns.notify_all()

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        """Let another role go on until the condition holds and this one is drawn."""
        me = threading.get_ident()
        with self.turns:
            self.waits[me] = until
            self._choose()
            self.turns.wait_for(lambda: self.running == me or bool(self.failures), timeout=30)
            assert not self.failures, "another role failed"
            assert self.running == me, "no turn in 30 s"

    def run(self, bodies: list[Callable[[], object]]) -> None:
        begun = threading.Barrier(len(bodies))

        def role(body: Callable[[], object]) -> None:
            me = threading.get_ident()
            with self.turns:
                self.waits[me] = lambda: True
            begun.wait()
            try:
                with self.turns:
                    if self.running is None:
                        self._choose()
                    self.turns.wait_for(lambda: self.running == me)
                body()
                with self.turns:
                    del self.waits[me]
                    self._choose()
            except BaseException as failure:  # noqa: BLE001  raised again by the caller
                with self.turns:
                    self.failures.append(failure)
                    self.turns.notify_all()

        threads = [threading.Thread(target=role, args=(body,)) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if self.failures:
            raise self.failures[0]


class Machine:
    """One program at a time."""

    def __init__(self, seed: int) -> None:
        self.program, self.roles = (0, 0), Roles(seed)
        self.copies: list[Callable[[], Any]] = []
        self.open: dict[int, int] = {}
        self.unordered: set[int] = set()

    def fence(self) -> None:
        self.unordered.discard(threading.get_ident())

    def copy(self, target: Shared, source: Pointer, mask: torch.Tensor) -> None:
        target.data.view(torch.uint8).fill_(0xFF)  # NaN in every format
        self.copies.append(lambda: target.data.copy_(source.load(mask, 0)))

    def wait_copies(self, outstanding: int) -> None:
        assert outstanding == 0
        for copy in self.copies:
            copy()
        self.copies.clear()

    def copies_arrive(self, barrier: Shared, *, increment_count: bool) -> None:
        assert not increment_count
        self.wait_copies(0)
        self.arrive(barrier, count=128)

    def init(self, barrier: Shared, *, count: int) -> None:
        """[phase, arrivals still missing, arrivals of a phase] in the bits of one number."""
        barrier.data.fill_(count << 40 | count << 20)

    def arrive(self, barrier: Shared, *, count: int) -> None:
        state = int(barrier.data)
        whole, missing, phase = state >> 40, (state >> 20 & 0xFFFFF) - count, state & 0xFFFFF
        assert missing >= 0, "more arrivals than a phase has"
        barrier.data.fill_(whole << 40 | (missing << 20 | phase if missing else whole << 20 | phase + 1))
        self.roles.pause()

    def wait(self, barrier: Shared, phase: int) -> None:
        self.roles.pause(lambda: int(barrier.data) & 1 != phase)
        self.unordered.add(threading.get_ident())

    def product(self, a: Shared, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Open:
        assert is_async
        me = threading.get_ident()
        assert me not in self.unordered, "a product without a fence behind the barrier that its operands passed"
        self.open[me] = self.open.get(me, 0) + (not isinstance(acc, Open))
        assert self.open[me] == 1, "a product starts while another one is open"
        reads = acc.reads if isinstance(acc, Open) else []
        before = acc.value if isinstance(acc, Open) else acc
        value = a.data.float() @ b.data.float()
        return Open(value + before if use_acc else value, [*reads, (a, a.data.clone()), (b, b.data.clone())])

    def wait_product(self, outstanding: int, deps: list[Open]) -> torch.Tensor:
        assert outstanding == 0
        self.roles.pause()
        self.open[threading.get_ident()] = 0
        for memory, seen in deps[0].reads:
            assert torch.equal(memory.data, seen), "memory changed, or held NaN, under an open product"
        return deps[0].value

    def specialize(self, parts: list[tuple[Any, Any]], _warps: object, _registers: object) -> None:
        self.roles.run([lambda part=part: part[0](*part[1]) for part in parts])


def unpacked(asm: str, _constraints: str, given: list[torch.Tensor], *_: Any, **__: Any) -> Any:
    """What the assembler text says: four E4M3 values of a word, scaled, as two words of two bf16. A scale is fp32 or,
    an integer, two bf16."""
    words, scale = torch.broadcast_tensors(*given)
    values = words.contiguous().view(torch.uint8).view(*words.shape, 4).view(torch.float8_e4m3fn).float()
    if asm == "shifted":
        half = (words[..., None] >> torch.tensor([0, 8, 16, 24])) & 0xFF
        half = ((half << 4 & 0x7F0) | (half << 8 & 0x8000)).to(torch.uint16).view(torch.bfloat16)
        scales = scale.contiguous().view(torch.bfloat16).view(*scale.shape, 2).repeat(*(1,) * scale.dim(), 2)
        pairs = (half * scales).view(torch.int32)
    elif scale.dtype is torch.int32:
        scales = scale.contiguous().view(torch.bfloat16).view(*scale.shape, 2).repeat(*(1,) * scale.dim(), 2)
        pairs = (values.bfloat16() * scales).view(torch.int32)
    else:
        pairs = (values * scale[..., None]).bfloat16().view(torch.int32)
    return pairs[..., 0], pairs[..., 1]


def language(machine: Machine) -> dict[str, Any]:
    """Names that the module's functions use."""

    def layout(*_args: Any, **_kwargs: Any) -> None:
        return None

    def allocate(dtype: Any, shape: list[int], _layout: Any) -> Shared:
        return Shared(torch.full([*shape], 0xFF, dtype=torch.uint8).repeat_interleave(dtype.itemsize, -1).view(dtype))

    def store(target: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
        mask = mask.broadcast_to(target.place.shape)
        target.memory[target.place.long()[mask]] = value[mask]

    same = ("int32", "int64", "float32", "bfloat16", "exp2", "log2", "where", "maximum", "reshape")
    gl = types.SimpleNamespace(
        **{name: getattr(torch, name) for name in same},
        BlockedLayout=layout,
        DistributedLinearLayout=layout,
        SliceLayout=layout,
        SwizzledSharedLayout=layout,
        NVMMADistributedLayout=layout,
        NVMMASharedLayout=type("NVMMASharedLayout", (), {"__new__": layout, "get_default_for": staticmethod(layout)}),
        allocate_shared_memory=allocate,
        arange=lambda first, end, layout: torch.arange(first, end),
        broadcast=torch.broadcast_tensors,
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        cdiv=lambda a, b: -(-a // b),
        max=lambda x, axis: x.amax(axis),
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        sum=lambda x, axis: x.sum(axis),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        inline_asm_elementwise=unpacked,
        join=lambda a, b: torch.stack([a, b], dim=-1),
        static_range=range,
        thread_barrier=lambda: None,
        program_id=lambda axis: torch.tensor(machine.program[axis]),
        load=lambda source, mask=None, other=0: source.load(mask, other),
        store=store,
        warp_specialize=machine.specialize,
    )
    barriers = types.SimpleNamespace(init=machine.init, arrive=machine.arrive, wait=machine.wait, MBarrierLayout=layout)
    copies = types.SimpleNamespace(
        async_copy_global_to_shared=machine.copy,
        commit_group=lambda: None,
        wait_group=machine.wait_copies,
        mbarrier_arrive=machine.copies_arrive,
    )
    names: dict[str, Any] = {
        "gl": gl,
        "async_copy": copies,
        "mbarrier": barriers,
        "fence_async_shared": machine.fence,
        "warpgroup_mma": machine.product,
        "warpgroup_mma_wait": machine.wait_product,
        "gdc_launch_dependents": lambda: None,
        "gdc_wait": lambda: None,
        "_LN2": math.log(2),
        "_PLAIN_REGISTERS": (0, 0),
        "_QUANTISED_REGISTERS": (0, 0),
        "_UNPACK": "",
        "_UNPACK_PAIRS": "",
        "_UNPACK_SHIFTED": "shifted",
        "SHORT_TILES": None,
        "LONG_TILES": None,
    }
    for name, function in {**vars(triton_gather), **vars(triton_gather_staged), **vars(triton_roles)}.items():
        if hasattr(function, "fn") and hasattr(function.fn, "__code__"):
            names[name] = types.FunctionType(function.fn.__code__, names, name)
    return names


def run(
    q: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    layout: KVRowLayout,
    *,
    splits: int,
    block_n: int = 64,
    unpacking: int = 0,
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
    lifted = 2.0**60 if unpacking == 3 and layout.name == "mxfp8" else 1.0
    causal = chunk_start is not None
    head_blocks = -(-heads // 64)
    for place in range(-(-tokens * heads // 64) if causal else tokens * head_blocks):
        for split in range(splits):
            machine = Machine(seed=place * splits + split)
            machine.program = (place, split)
            language(machine)["attend_roles"](
                *(Pointer(memory) for memory in (q, values, scales, ropes, rows, lengths, out, lse)),
                *(q.stride(0), q.stride(1), rows.stride(0), lifted * SCALE / math.log(2), heads, head_blocks),
                *(block_size, splits, tokens, chunk_start or 0, LATENT, layout.rope_dim, layout.row_elems),
                *(
                    ropes.shape[1],
                    layout.tile,
                    layout.name == "mxfp8",
                    splits == 1,
                    block_size > 0,
                    causal,
                    block_n,
                    unpacking,
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


LAYOUTS = [("bf16", 0), ("bf16", 64), ("fp8_ds_mla", 64), ("fp8_ds_mla", 0), ("mxfp8", 0)]


@pytest.mark.parametrize(("name", "p"), LAYOUTS)
@pytest.mark.parametrize(("splits", "block_n"), [(1, 64), (2, 64), (1, 32), (2, 32)])
def test_equals_the_reference(name: str, p: int, splits: int, block_n: int) -> None:
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


@pytest.mark.parametrize(("name", "p"), LAYOUTS[2:])
@pytest.mark.parametrize("block_n", [64, 32])
def test_every_way_to_unpack_gives_the_same_bits(name: str, p: int, block_n: int) -> None:
    layout = kv_row_layout(name, latent_dim=LATENT, rope_dim=p, model_dtype=torch.bfloat16)
    rows, counts = draw_rows(3, 200, [200, 97, 130])
    pool, q = poisoned(layout, rows), torch.randn(3, 3, LATENT + p).bfloat16()
    used = rows[0, :200]
    if name == "mxfp8":
        pool[used, LATENT:] = (torch.arange(200 * 16).view(200, 16) % 60 + 100).byte()
    else:
        scales = 1.37 * 2.0 ** torch.arange(-400, 400).div(8)
        pool.view(torch.float32)[used, LATENT // 4 : LATENT // 4 + 4] = scales.view(200, 4)
    want = run(q, pool, rows, counts, layout, splits=2, block_n=block_n)
    assert want[0][0].isfinite().all()
    for unpacking in (1, 2, 3):
        got = run(q, pool, rows, counts, layout, splits=2, block_n=block_n, unpacking=unpacking)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_products_in_pairs_equal_those_in_fp32() -> None:
    """Every byte times every scale: subnormal numbers, what overflows and NaN included. Shifted values are 2**-60 times
    as large, as far as that fits; no scale hides a NaN or what is too large."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    names = language(Machine(0))
    unpack, lifted = names["unpack"], names["factors"](codes, True, 3)
    fits = torch.zeros(256, dtype=torch.bool)
    fits[63:195] = True
    fits = fits.view(16, 16, 1).expand(16, 16, 32).reshape(16, 512)
    for first in range(0, 256, 32):
        words = torch.arange(first, first + 32, dtype=torch.uint8).view(torch.int32).expand(16, 16, 8)
        want, got = (unpack(words, codes, True, way).view(torch.bfloat16) for way in (0, 1))
        assert torch.equal(want.isnan(), got.isnan())
        assert torch.equal(want.nan_to_num(), got.nan_to_num())
        shifted = unpack(words, lifted, True, 3).view(torch.bfloat16)
        known = torch.tensor([code % 128 != 127 for code in range(first, first + 32)]).repeat(16)
        assert torch.equal(shifted[fits & known], (want.float() * 2.0**-60).bfloat16()[fits & known])
        assert shifted.view(16, 16, 32)[-1, -1].isnan().all()
        assert not shifted.view(16, 16, 32)[12, 3:].isfinite().any()


@pytest.mark.parametrize("block_n", [64, 32])
def test_rows_from_a_block_table(block_n: int) -> None:
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
