"""Triton selection of the DSA indexer for uniform decodes: paged scores, then the top-k of ``ops.topk``.

Scores: a program takes tiles of entries of one row, gathers their keys page by page, multiplies them with all heads'
queries on the tensor cores and sums the weighted, rectified products in fp32. Tiles beyond what a row sees cost
nothing, so a graph captured for the longest table runs at the price of the lengths that are there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sidestream.ops.topk.triton_select import PhysicalRows, SelectPlan, select_plan, select_rows

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Kernels run on a CPU: numpy has no bf16, so operands of products are made fp32 there."""

_MULTIPROCESSORS = 132
_START_TILES = 2
"""What a program takes before its first tile, in tiles."""


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """Launch parameters of the scores.

    Attributes:
        block: entries a tile. The same for all rows, so that a score does not depend on the batch.
        splits: programs a row, which take its tiles in turn.
        pdl: launch while the kernel before still runs (programmatic dependent launch), and wait for it there.
        late: then let the kernel behind start as programs end, not at once: early ones take room where there is some.
    """

    block: int
    splits: int
    warps: int
    stages: int
    pdl: bool = False
    late: bool = False


@lru_cache(maxsize=1024)
def score_plan(rows: int, entries: int, heads: int) -> ScorePlan:
    """For ``rows`` padded rows of at most ``entries``: whole waves of as many programs as an H200 holds at once."""
    block, stages, held = (64, 2, 5) if heads <= 32 else (128, 3, 2) if heads <= 64 else (64, 3, 2)
    tiles = -(-entries // block)

    def cost(splits: int) -> int:
        return -(-rows * splits // (held * _MULTIPROCESSORS)) * (-(-tiles // splits) + _START_TILES)

    splits = min(range(1, min(tiles, held * _MULTIPROCESSORS) + 1), key=cost)
    return ScorePlan(block=block, splits=splits, warps=4, stages=stages, pdl=not INTERPRETED)


@triton.jit
def _score_tile(
    tile, page, query, weight, keys, scores, valid, key_block, key_entry, key_dim,
    PER_BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """Scores of one tile's entries, which lie on ``page``."""
    entry = tile * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, DIM)
    seen = entry < valid
    place = page.to(tl.int64) * key_block + (entry % PER_BLOCK) * key_entry
    key = tl.load(keys + place[:, None] + dims[None, :] * key_dim, mask=seen[:, None], other=0.0)
    if FP32:
        key = key.to(tl.float32)
    similarity = tl.dot(key, query)
    # NaN stays NaN.
    similarity = tl.where(similarity < 0.0, 0.0, similarity)
    tl.store(scores + entry, tl.sum(similarity * weight[None, :], axis=1), mask=seen)


@triton.jit
def _pages(table, tile, capacity, table_col, PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """Block of each entry of a tile; the table names some block for all it has room for."""
    entry = tile * BLOCK + tl.arange(0, BLOCK)
    return tl.load(table + (entry // PER_BLOCK) * table_col, mask=entry < capacity, other=0)


@triton.jit
def _rotated(query, where, cos, sin, dims, q_dim, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """``query`` [DIM, HEADS], which was read at ``where``, with its first ROPE dimensions rotated and rounded."""
    inside = dims < ROPE
    half: tl.constexpr = ROPE // 2
    if INTERLEAVED:
        pair, first = dims // 2, dims % 2 == 0
        shift = tl.where(first, 1, -1)
    else:
        pair, first = dims % half, dims < half
        # Told that runs of ``half`` move as one, the compiler reads whole vectors.
        shift = tl.max_constancy(tl.multiple_of(tl.where(first, half, -half), half), half)
    c = tl.load(cos + pair, mask=inside, other=1.0)
    s = tl.load(sin + pair, mask=inside, other=0.0)
    other = tl.load(where + (shift * q_dim)[:, None], mask=inside[:, None], other=0.0).to(tl.float32)
    turned = query.to(tl.float32) * c[:, None] + other * tl.where(first, -s, s)[:, None]
    return turned.to(query.dtype)


@triton.jit(do_not_specialize=["table_row", "capacity", "picks", "splits"])
def _scores_kernel(
    q, weights, keys, table, lens, cos, sin, scores, tickets,
    q_row, q_head, q_dim, weights_row, weights_head, key_block, key_entry, key_dim, table_row, table_col, lens_stride,
    cos_row, sin_row, scores_row, capacity, picks, splits,
    KPOOL: tl.constexpr, PER_BLOCK: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, TICKET: tl.constexpr, FP32: tl.constexpr, PDL: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    # Asked for before the length is known: tables and lengths are no kernel's results.
    page = _pages(table + row * table_row, split, capacity, table_col, PER_BLOCK, BLOCK)
    valid = (tl.load(lens + row * lens_stride) // KPOOL).to(tl.int32)
    if PDL:
        gdc_wait()
        if not LATE:
            gdc_launch_dependents()
    if TICKET and split == 0:
        tl.store(tickets + row, 0)
    if valid > picks:
        head, dims = tl.arange(0, HEADS), tl.arange(0, DIM)
        where = q + row * q_row + head[None, :] * q_head + dims[:, None] * q_dim
        query = tl.load(where)
        if ROPE > 0:
            query = _rotated(query, where, cos + row * cos_row, sin + row * sin_row, dims, q_dim, ROPE, INTERLEAVED)
        weight = tl.load(weights + row * weights_row + head * weights_head).to(tl.float32)
        if FP32:
            query = query.to(tl.float32)
        table += row * table_row
        scores += row * scores_row
        tiles = (valid + BLOCK - 1) // BLOCK
        if FP32:
            # The interpreter has no range over values that it read.
            tile = split
            while tile < tiles:
                page = _pages(table, tile, capacity, table_col, PER_BLOCK, BLOCK)
                _score_tile(tile, page, query, weight, keys, scores, valid, key_block, key_entry, key_dim,
                            PER_BLOCK, DIM, BLOCK, FP32)  # fmt: skip
                tile += splits
        else:
            for tile in range(split, tiles, splits):
                _score_tile(tile, page, query, weight, keys, scores, valid, key_block, key_entry, key_dim,
                            PER_BLOCK, DIM, BLOCK, FP32)  # fmt: skip
                page = _pages(table, tile + splits, capacity, table_col, PER_BLOCK, BLOCK)


def takes(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, table: torch.Tensor, picks: int) -> bool:
    """Whether the kernels are made for these: bf16 queries and keys, heads and channels that fill matrix units, and
    contexts whose selection fits (``select_plan``)."""
    _, heads, dim = q.shape
    entries = table.shape[1] * keys.shape[1]
    return (
        q.dtype is torch.bfloat16
        and keys.dtype is torch.bfloat16
        and weights.dtype in (torch.float32, torch.bfloat16)
        and heads in (16, 32, 64, 128)
        and dim in (32, 64, 128)
        and picks > 0
        and entries > 0
        and select_plan(entries, picks, rows=q.shape[0]) is not None
    )


def paged_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    *,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    picks: int,
    kpool: int,
    tickets: torch.Tensor | None,
    plan: ScorePlan,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """[R, B * per_block and up to 15 more] fp32 scores, without ``scale``.

    Only rows that see more than ``picks`` entries are written, up to the last that they see. ``tickets`` [R] int32 are
    set to 0 in passing.
    """
    rows, heads, dim = q.shape
    per_block = keys.shape[1]
    entries = block_table.shape[1] * per_block
    width = -(-entries // 16) * 16  # so that selections can read whole vectors
    scores = torch.empty(rows, width, dtype=torch.float32, device=q.device)
    angles = (cos, sin) if cos is not None and sin is not None else (scores, scores)
    assert all(angle.stride(1) == 1 for angle in angles), "angles of a row lie side by side"
    _scores_kernel[rows, plan.splits](
        q, weights, keys, block_table, context_lens, *angles, scores, tickets if tickets is not None else context_lens,
        *q.stride(), *weights.stride(), *keys.stride(), *block_table.stride(), context_lens.stride(0),
        angles[0].stride(0), angles[1].stride(0), width, entries, picks, plan.splits, KPOOL=kpool,
        PER_BLOCK=per_block, HEADS=heads, DIM=dim, BLOCK=plan.block, ROPE=2 * cos.shape[1] if cos is not None else 0,
        INTERLEAVED=interleaved, TICKET=tickets is not None, FP32=INTERPRETED, PDL=plan.pdl, launch_pdl=plan.pdl,
        LATE=plan.late, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return scores


def select_topk_decode(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    *,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    topk: int,
    kpool: int,
    scale: float,
    out: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    physical: PhysicalRows | None = None,
    scoring: ScorePlan | None = None,
    selecting: SelectPlan | None = None,
) -> None:
    """As ``decode.select_topk_decode``, for what ``takes`` accepts.

    The number of programs a row depends on the padded row count; results do not.

    Args:
        physical: also written, as ``logical_to_physical`` would with ``block_size = keys.shape[1] * kpool`` and one
            token a row of the block table.
        scoring, selecting: launch parameters other than the usual ones.
    """
    rows = q.shape[0]
    assert topk % kpool == 0, f"top-k of {topk} tokens is no whole number of pools of {kpool}"
    assert scale > 0, f"scale {scale} would change the order of scores"
    assert out.shape == (rows, topk + kpool - 1), f"top-k rows of {tuple(out.shape)}, need {(rows, topk + kpool - 1)}"
    assert context_lens.shape == (rows,), f"context lengths of {tuple(context_lens.shape)} for {rows} rows"
    if rows == 0:
        return
    per_block, picks = keys.shape[1], topk // kpool
    entries = block_table.shape[1] * per_block
    selecting = selecting if selecting is not None else select_plan(entries, picks, rows=rows)
    assert selecting is not None, f"{picks} of {entries} entries fit no program"
    scores, tickets = torch.empty(rows, entries, dtype=torch.float32, device=q.device), None
    if entries > picks:
        tickets = torch.empty(rows, dtype=torch.int32, device=q.device) if selecting.splits > 1 else None
        scores = paged_scores(
            q,
            weights,
            keys,
            block_table=block_table,
            context_lens=context_lens,
            picks=picks,
            kpool=kpool,
            tickets=tickets,
            plan=scoring if scoring is not None else score_plan(rows, entries, q.shape[1]),
            cos=cos,
            sin=sin,
            interleaved=interleaved,
        )
    select_rows(
        scores,
        context_lens,
        out,
        picks=picks,
        kpool=kpool,
        per_block=per_block,
        plan=selecting,
        tickets=tickets,
        physical=physical,
    )
