"""The indexer of a decode on a GPU at real shapes: exact selections, poison, ragged lengths, repeats, graphs.

Where scores are small integers, bf16 products are exact and the selection must agree in every entry. Where they are
not, entries whose scores differ by rounding may change places.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sidestream.core.ring import plan_ring
from sidestream.core.segment import Segment
from sidestream.ops.index_map import torch_impl as map_torch
from sidestream.ops.indexer import (
    decode,
    reference,
    select_topk,
    select_topk_decode,
    torch_impl,
    triton_decode,
    triton_prefill,
    write_keys,
    write_normed_keys,
    write_pools,
)
from sidestream.ops.indexer import keys as torch_keys
from sidestream.ops.norm import torch_impl as torch_norm
from sidestream.ops.topk.triton_select import PhysicalRows, select_plan
from tests.gpu.host_waits import host_waits_raise
from tests.tolerances import BF16_OUTPUT, FP32_ROUNDING, SCORE_TIE

pytestmark = pytest.mark.gpu

POISON, BLOCK, DIM, TOPK = 0x7F7F7F7F, 64, 128, 2048
SHAPES = [(32, 4, 8192), (64, 1, 8192), (32, 4, 262144), (64, 1, 163840)]
"""Heads, tokens a pool, tokens a table has room for."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Step:
    """Contexts on shuffled pages; NaN in every entry that no row sees, block 0 and padding rows' queries included."""

    def __init__(self, heads: int, kpool: int, lengths: list[int], table: int, *, exact: bool, spare: int = 0) -> None:
        self.kpool, rows, per_block = kpool, len(lengths), BLOCK // kpool
        used = [-(-length // BLOCK) for length in lengths]
        pages = torch.randperm(sum(used), device="cuda") + 1 + spare
        self.context_lens = torch.tensor(lengths, device="cuda")
        self.block_table = torch.zeros(rows, table // BLOCK, dtype=torch.int64, device="cuda")
        self.keys = torch.full((sum(used) + 1 + spare, per_block, DIM), math.nan, dtype=torch.bfloat16, device="cuda")
        flat, first = self.keys.view(-1, DIM), 0
        for row, (length, blocks) in enumerate(zip(lengths, used, strict=True)):
            own = pages[first : first + blocks]
            self.block_table[row, :blocks] = own
            where = (own[:, None] * per_block + torch.arange(per_block, device="cuda")).view(-1)[: length // kpool]
            flat[where] = self.draw(exact, len(where), DIM).bfloat16()
            first += blocks
        self.q = (self.draw(exact, rows, heads, DIM) * (1.0 if exact else DIM**-0.5)).bfloat16()
        self.q[self.context_lens == 0] = math.nan
        self.weights = self.draw(exact, rows, heads) * (1.0 if exact else heads**-0.5)
        self.out = torch.full((rows, TOPK + kpool - 1), POISON, dtype=torch.int32, device="cuda")

    def draw(self, exact: bool, *shape: int) -> torch.Tensor:
        if exact:
            return torch.randint(-2, 3, shape, device="cuda").float()
        return torch.randn(*shape, device="cuda")

    def arguments(self) -> dict[str, Any]:
        self.out.fill_(POISON)
        named = {"block_table": self.block_table, "context_lens": self.context_lens, "out": self.out}
        return named | {"topk": TOPK, "kpool": self.kpool, "scale": 0.5}

    def run(self) -> torch.Tensor:
        select_topk_decode(self.q, self.weights, self.keys, **self.arguments())
        return self.out

    def want(self) -> torch.Tensor:
        decode.select_topk_decode(self.q, self.weights, self.keys, **self.arguments())
        return self.out.clone()


def lengths_for(table: int) -> list[int]:
    some = [8191, 0, 1, 3, 4, 2047, 2048, 2049, 2051, 2052, 2053, 8189, 5000, 0]
    return some + ([table, table - 3, table // 2 + 1, 33000] if table > 8192 else [])


@pytest.mark.parametrize(("heads", "kpool", "table"), SHAPES)
def test_equals_torch_twenty_times(heads: int, kpool: int, table: int) -> None:
    step = Step(heads, kpool, lengths_for(table), table, exact=True)
    assert triton_decode.takes(step.q, step.weights, step.keys, step.block_table, TOPK // kpool)
    want = step.want()
    for length, row in zip(lengths_for(table), want, strict=True):
        assert int((row >= 0).sum()) == min(length - length % kpool, TOPK) + length % kpool
    for _ in range(20):
        assert torch.equal(step.run(), want)
    for row in (0, 1, 9):
        alone = Step.__new__(Step)
        alone.kpool, alone.keys, one = kpool, step.keys, slice(row, row + 1)
        alone.q, alone.weights = step.q[one], step.weights[one]
        alone.block_table, alone.context_lens = step.block_table[one], step.context_lens[one]
        alone.out = torch.empty_like(want[one])
        assert torch.equal(alone.run(), want[one]), "a row depends on its batch"


@pytest.mark.parametrize(("heads", "kpool", "table"), SHAPES)
@pytest.mark.parametrize("shared", [False, True])
def test_physical_rows_from_the_same_launch(heads: int, kpool: int, table: int, shared: bool) -> None:
    step = Step(heads, kpool, lengths_for(table), table, exact=True)
    want, rows = step.want(), step.q.shape[0]
    want_rows = torch.empty(want.shape, dtype=torch.int64, device="cuda")
    want_counts = torch.empty(rows, dtype=torch.int32, device="cuda")
    named: dict[str, Any] = {"out": want_rows, "counts": want_counts, "block_size": BLOCK}
    map_torch.logical_to_physical(want, step.block_table, token_rows=torch.arange(rows, device="cuda"), **named)
    physical = PhysicalRows(step.block_table, torch.full_like(want_rows, POISON), torch.full_like(want_counts, POISON))
    plan = select_plan(table // kpool, TOPK // kpool, rows=rows if shared else 1 << 20)
    named = {"physical": physical, "selecting": plan}
    triton_decode.select_topk_decode(step.q, step.weights, step.keys, **step.arguments(), **named)
    assert torch.equal(step.out, want)
    assert torch.equal(physical.rows, want_rows)
    assert torch.equal(physical.counts, want_counts)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_queries_and_normed_keys_equal_torch(interleaved: bool) -> None:
    """By right angles, which keep integers integers; a norm of keys to bf16's rounding."""
    step = Step(64, 1, [8191, 0, 2500, 40], 8192, exact=True)
    turns = torch.randint(0, 4, (4, 32), device="cuda") * torch.pi / 2
    turn: dict[str, Any] = {"cos": turns.cos().round(), "sin": turns.sin().round(), "interleaved": interleaved}
    named = step.arguments() | turn
    decode.select_topk_decode(step.q, step.weights, step.keys, **named)
    want = step.out.clone()
    assert not torch.equal(step.run(), want)
    step.out.fill_(POISON)
    select_topk_decode(step.q, step.weights, step.keys, **named)
    assert torch.equal(step.out, want)
    k = (torch.randn(4, DIM, device="cuda") * 3 + 1).bfloat16()
    norm: dict[str, Any] = {"norm_weight": torch.randn(DIM), "norm_bias": torch.randn(DIM)}
    norm = {name: value.cuda().bfloat16() for name, value in norm.items()} | {"norm_eps": 1e-6}
    keys, rows = torch.full((9, DIM), math.nan, dtype=torch.bfloat16, device="cuda"), torch.tensor([7, 2, 4, 0]).cuda()
    write_normed_keys(keys, rows, k, **norm, **turn)
    wanted = torch_keys.rotate_leading(torch_norm.layer_norm(k, *list(norm.values())[:2], eps=1e-6), **turn)
    torch.testing.assert_close(keys[rows], wanted, rtol=2 * BF16_OUTPUT, atol=FP32_ROUNDING)
    assert keys[[1, 3, 5, 6, 8]].isnan().all()


@pytest.mark.parametrize(("heads", "kpool"), [(32, 4), (64, 1)])
def test_random_scores_select_what_the_reference_scores_highest(heads: int, kpool: int) -> None:
    step = Step(heads, kpool, [8191, 4000], 8192, exact=False)
    got = step.run().cpu()
    for row, length in enumerate((8191, 4000)):
        seen, per_block = length // kpool, BLOCK // kpool
        entry = torch.arange(seen, device="cuda")
        keys = step.keys[step.block_table[row, entry // per_block], entry % per_block].cpu()
        scores = reference.index_scores(step.q[row : row + 1].cpu(), step.weights[row : row + 1].cpu(), keys, scale=1.0)
        mask = torch.zeros(seen, dtype=torch.bool)
        mask[got[row, :TOPK:kpool].long() // kpool] = True
        assert int(mask.sum()) == TOPK // kpool
        assert scores[0, mask].min() >= scores[0, ~mask].max() - SCORE_TIE


def test_a_graph_of_the_longest_table_follows_the_lengths() -> None:
    lengths = [100000, 8191, 0, 2053]
    variants = [Step(32, 4, some, 262144, exact=True) for some in (lengths, lengths[::-1])]
    held, spare = variants
    want = [step.want() for step in variants]
    names = ("q", "weights", "block_table", "context_lens", "keys")
    first = {name: getattr(held, name).clone() for name in names}
    held.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held.run()
    for source, expected in ((spare, want[1]), (first, want[0])):
        for name in names:
            value = source[name] if isinstance(source, dict) else getattr(source, name)
            getattr(held, name).copy_(value)
        graph.replay()
        assert torch.equal(held.out, expected)


def test_a_pool_beyond_two_to_the_31() -> None:
    spare = 2**31 // (16 * DIM) + 1  # elements, so bytes too
    step = Step(32, 4, [8191, 3000, 0], 8192, exact=True, spare=spare)
    assert step.keys.numel() > 2**31
    assert torch.equal(step.run(), step.want())
    entries = torch.tensor([step.keys.shape[0] * 16 - 1, 5, 0], device="cuda")
    k = torch.randn(3, DIM, device="cuda").bfloat16()
    write_keys(step.keys.view(-1, DIM), entries, k)
    assert torch.equal(step.keys.view(-1, DIM)[entries], k)


SPANS = {
    "prompt": ([(0, 9000)], 0),
    "chunk": ([(30000, 700)], 0),
    "ragged": ([(0, 40), (8100, 300), (0, 2060), (3000, 1), (20000, 33)], 0),
    "mixed": ([(8190, 1), (2047, 1), (100, 1), (40000, 1), (0, 3000), (5000, 500)], 4),
    "verify": ([(8190, 3), (2047, 3), (0, 2600)], 2),
}


@pytest.mark.parametrize(("heads", "kpool"), [(32, 4), (64, 1), (16, 2)])
@pytest.mark.parametrize("name", SPANS)
def test_prefill_equals_torch(name: str, heads: int, kpool: int) -> None:
    spans, num_decode = SPANS[name]
    segments, token = [], 0
    for row, (start, length) in enumerate(spans):
        segments.append(Segment(token, length, row, start))
        token += length
    step = Step(heads, kpool, [start + length for start, length in spans], 65536, exact=True)
    q, weights = step.draw(True, token, heads, DIM).bfloat16(), step.draw(True, token, heads).bfloat16()
    assert triton_prefill.takes(q, weights, step.keys, step.block_table, TOPK // kpool)
    positions = torch.cat([torch.arange(start, start + length) for start, length in spans]).cuda()
    named: dict[str, Any] = {"block_table": step.block_table, "positions": positions, "segments": segments}
    named |= {"num_decode": num_decode, "topk": TOPK, "kpool": kpool, "scale": 0.5}
    want, got = (torch.full((token + 2, TOPK + kpool - 1), POISON, dtype=torch.int32).cuda() for _ in range(2))
    torch_impl.select_topk(q, weights.float(), step.keys, out=want, **named)
    for scratch in (None, 24 << 20, None):
        got.fill_(POISON)
        with host_waits_raise():
            select_topk(q, weights, step.keys, out=got, scratch_bytes=scratch, **named)
        assert torch.equal(got, want), scratch


@pytest.mark.parametrize("rollback", [0, 2])
def test_pools_equal_the_reference(rollback: int) -> None:
    rows, ring = 64, 3 + rollback
    positions = [3 + 37 * i for i in range(rows - 2)] + [0, 0]
    slots = [*range(1, rows - 1), 0, 0]
    plan = plan_ring(positions, [1] * rows, slots, window=4, ring_length=ring)
    k, merged, ape = torch.randn(rows, DIM), torch.randn(rows, 3 * DIM).bfloat16(), torch.randn(4, DIM)
    k, gate = k.bfloat16(), merged[:, DIM : 2 * DIM]
    tail = torch.randn((rows + 1) * ring, 2 * DIM).bfloat16()
    tail[:ring] = math.nan
    keys = torch.full((500, DIM), math.nan, dtype=torch.bfloat16)
    done = [(position + 1) % 4 == 0 for position in positions[: rows - 2]]
    assert 0 < sum(done) < rows - 2
    entries = torch.tensor([100 + i if whole else 0 for i, whole in enumerate(done)] + [0, 0])
    want_tail, want_keys = tail.clone(), keys.clone()
    named: dict[str, Any] = {"tail": want_tail, "plan": plan, "keys_flat": want_keys, "entries": entries}
    reference.write_pools(k, gate, ape, **named)
    device_plan = plan.moved([tensor.cuda() for tensor in plan.tensors])
    inputs, first = (k.cuda(), merged.cuda()[:, DIM : 2 * DIM], ape.cuda()), None
    for _ in range(20):
        tail_dev, keys_dev = tail.cuda(), keys.cuda()
        write_pools(*inputs, tail=tail_dev, plan=device_plan, keys_flat=keys_dev, entries=entries.cuda())
        got_tail, got = tail_dev.cpu(), keys_dev.cpu()
        assert torch.equal(got_tail[ring:], want_tail[ring:])
        torch.testing.assert_close(got[100:], want_keys[100:], rtol=2 * BF16_OUTPUT, atol=FP32_ROUNDING, equal_nan=True)
        assert got[1:100].isnan().all()
        assert got[0].isfinite().all(), "a scratch key is finite"
        assert first is None or torch.equal(got[100:].nan_to_num(7.0), first)
        first = got[100:].nan_to_num(7.0)
