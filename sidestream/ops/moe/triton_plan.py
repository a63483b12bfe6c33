"""Which pairs of token and expert make up each block of the grouped experts, made on the device.

A block is some rows of one expert. Up to ``COUNTED_PAIRS`` pairs every expert's program counts all of them itself; for
prompts a launch of its own counts them by chunk, since 64 programs would take 130 us to go over 65,536 pairs twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

COUNTED_PAIRS = 8192
_CHUNK, _SHARE = 1024, 4
"""Pairs that are looked at at once; chunks a program places."""
_MOST_ROWS = 256
"""Of a block. With one bound for all, prompts of a size that no start has met compile nothing."""


def plan(
    ids: torch.Tensor, *, num_experts: int, rows: int, blocks: int, pdl: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of each block, ascending by expert and then by pair.

    Args:
        ids: contiguous [T, top_k]; -1 takes no expert.
        rows: of a block.
        blocks: as many as any choice needs.
    Returns:
        order [blocks * rows] int32, -1 behind the last pair of an expert, unwritten in blocks that are not needed; and
        the expert of each block [blocks] int32, -1 where it is not needed.
    """
    pairs = ids.numel()
    order = torch.empty(blocks * rows, dtype=torch.int32, device=ids.device)
    block_expert = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    assert rows <= _MOST_ROWS, f"blocks of {rows} rows, of {_MOST_ROWS} at most"
    bins = triton.next_power_of_2(num_experts + 1)
    if pairs <= COUNTED_PAIRS:
        _plan[(num_experts,)](
            ids,
            order,
            block_expert,
            pairs,
            num_experts,
            blocks,
            ROWS=rows,
            FILL=triton.next_power_of_2(rows),
            BINS=bins,
            CHUNK=128 if pairs <= 128 else _CHUNK,
            PDL=pdl,
            launch_pdl=pdl,
        )
        return order, block_expert
    chunks = triton.cdiv(pairs, _CHUNK)
    counts = torch.empty(chunks, bins, dtype=torch.int32, device=ids.device)
    _count[(chunks,)](ids, counts, pairs, num_experts, BINS=bins, CHUNK=_CHUNK)
    _place[(num_experts, triton.cdiv(chunks, _SHARE))](
        ids,
        counts,
        order,
        block_expert,
        pairs,
        num_experts,
        blocks,
        chunks,
        rows,
        FILL=_MOST_ROWS,
        BINS=bins,
        CHUNK=_CHUNK,
        SHARE=_SHARE,
        AT_ONCE=max(1, 2048 // bins),
    )
    return order, block_expert


@triton.jit  # type: ignore[untyped-decorator]
def _end(
    order: tl.tensor,
    block_expert: tl.tensor,
    expert: tl.tensor,
    first_block: tl.tensor,
    placed: tl.tensor,
    own_blocks: tl.tensor,
    used_blocks: tl.tensor,
    num_experts: tl.tensor,
    num_blocks: tl.tensor,
    rows: tl.tensor,
    FILL: tl.constexpr,
) -> None:
    """What lies behind an expert's last pair, the expert of its blocks, and its share of blocks that nobody needs."""
    rest = placed + tl.arange(0, FILL)
    tl.store(order + first_block * rows + rest, tl.full([FILL], -1, tl.int32), mask=rest < own_blocks * rows)
    few = tl.arange(0, 32)
    for first in range(0, own_blocks, 32):
        own = tl.zeros([32], tl.int32) + expert
        tl.store(block_expert + first_block + first + few, own, mask=first + few < own_blocks)
    for first in range(used_blocks + expert * 32, num_blocks, num_experts * 32):
        tl.store(block_expert + first + few, tl.full([32], -1, tl.int32), mask=first + few < num_blocks)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_blocks"])  # type: ignore[untyped-decorator]
def _plan(
    ids: tl.tensor,
    order: tl.tensor,
    block_expert: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    num_blocks: tl.tensor,
    ROWS: tl.constexpr,
    FILL: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program e places the pairs of expert e, ascending, behind the blocks of the experts before it.

    Writes ``order`` [num_blocks * ROWS], -1 where a block has no pair, and ``block_expert`` [num_blocks], -1 where no
    block is needed. ``order`` is left unwritten there. BINS is more than the number of experts.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    lane = tl.arange(0, CHUNK)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, num_pairs, CHUNK):
        chosen = tl.load(ids + first + lane, mask=first + lane < num_pairs, other=-1).to(tl.int32)
        counts += tl.histogram(tl.where(chosen < 0, num_experts, chosen), BINS)
    blocks = tl.where(bins < num_experts, (counts + ROWS - 1) // ROWS, 0)
    first_block = tl.sum(tl.where(bins < expert, blocks, 0), 0)
    own_blocks = tl.sum(tl.where(bins == expert, blocks, 0), 0)
    used_blocks = tl.sum(blocks, 0)
    placed = 0
    for first in range(0, num_pairs, CHUNK):
        chosen = tl.load(ids + first + lane, mask=first + lane < num_pairs, other=-1).to(tl.int32)
        mine = (chosen == expert).to(tl.int32)
        place = placed + tl.cumsum(mine, 0) - 1
        tl.store(order + first_block * ROWS + place, first + lane, mask=mine > 0)
        placed += tl.sum(mine, 0)
    _end(order, block_expert, expert, first_block, placed, own_blocks, used_blocks, num_experts, num_blocks, ROWS, FILL)


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])  # type: ignore[untyped-decorator]
def _count(
    ids: tl.tensor,
    counts: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """counts [chunks, BINS]: pairs of each expert in each chunk."""
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(ids + at, mask=at < num_pairs, other=-1).to(tl.int32)
    found = tl.histogram(tl.where(chosen < 0, num_experts, chosen), BINS)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), found)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_blocks", "chunks", "rows"])  # type: ignore[untyped-decorator]
def _place(
    ids: tl.tensor,
    counts: tl.tensor,
    order: tl.tensor,
    block_expert: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    num_blocks: tl.tensor,
    chunks: tl.tensor,
    rows: tl.tensor,
    FILL: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARE: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """Program (e, i) places the pairs of expert e in chunks SHARE * i and on, as ``_plan`` does; the last i ends it."""
    expert = tl.program_id(0)
    first_chunk = tl.program_id(1) * SHARE
    bins = tl.arange(0, BINS)
    several = tl.arange(0, AT_ONCE)
    all_of = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for first in range(0, chunks, AT_ONCE):
        chunk = (first + several)[:, None]
        found = tl.load(counts + chunk * BINS + bins[None, :], mask=chunk < chunks, other=0)
        all_of += tl.sum(found, 0)
        before += tl.sum(tl.where(chunk < first_chunk, found, 0), 0)
    blocks = tl.where(bins < num_experts, (all_of + rows - 1) // rows, 0)
    first_block = tl.sum(tl.where(bins < expert, blocks, 0), 0)
    placed = tl.sum(tl.where(bins == expert, before, 0), 0)
    lane = tl.arange(0, CHUNK)
    for chunk in range(first_chunk, tl.minimum(first_chunk + SHARE, chunks)):
        pair = chunk * CHUNK + lane
        chosen = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        mine = (chosen == expert).to(tl.int32)
        place = placed + tl.cumsum(mine, 0) - 1
        tl.store(order + first_block * rows + place, pair, mask=mine > 0)
        placed += tl.sum(mine, 0)
    if first_chunk + SHARE >= chunks:
        own_blocks = tl.sum(tl.where(bins == expert, blocks, 0), 0)
        used_blocks = tl.sum(blocks, 0)
        _end(
            order,
            block_expert,
            expert,
            first_block,
            placed,
            own_blocks,
            used_blocks,
            num_experts,
            num_blocks,
            rows,
            FILL,
        )
