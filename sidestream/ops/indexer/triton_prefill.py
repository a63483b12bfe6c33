"""Triton selection of the DSA indexer for prefills and mixed steps: scores of many queries, then ``ops.topk``'s top-k.

Scores: a program takes some queries of one sequence and tiles of its entries in turn. All heads of all its queries are
the columns of one product on the tensor cores, so that a key that was gathered is used for each of them. Scores of as
many tokens as fit a scratch cap are made, then their top-k is taken, and so on: the host loops over segments, whose
lengths it knows, and reads nothing back.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from sidestream.core.segment import Segment
from sidestream.ops.decode_groups import decode_length, scratch_of
from sidestream.ops.indexer import triton_decode
from sidestream.ops.rope import apply_rope
from sidestream.ops.topk.triton_select import MAX_BLOCK, SelectPlan, select_plan, select_rows, whole_block

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Kernels run on a CPU: numpy has no bf16, so operands of products are made fp32 there."""
_PROGRAMS = 8 * 132
"""Programs of a launch of few queries, which share the entries of each: enough for an H200's 132 multiprocessors."""


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Launch parameters of the scores: ``columns`` of a product (queries times heads), ``block`` entries a tile."""

    columns: int
    block: int
    warps: int
    stages: int


DEFAULT_PLAN = PrefillPlan(columns=256, block=64, warps=8, stages=2)


@triton.jit
def _pages(table, tile, visible, table_col, PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """Block of each entry of a tile that is seen."""
    entry = tile * BLOCK + tl.arange(0, BLOCK)
    return tl.load(table + (entry // PER_BLOCK) * table_col, mask=entry < visible, other=0)


@triton.jit
def _score_tile(
    tile, page, query, weight, keys, scores, row, rows, visible, scores_row, key_block, key_entry, key_dim,
    PER_BLOCK: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    FP32: tl.constexpr,
):  # fmt: skip
    """Scores of one tile's entries, which lie on ``page``, for all queries of the program."""
    entry = tile * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, DIM)
    seen = entry < visible
    place = page.to(tl.int64) * key_block + (entry % PER_BLOCK) * key_entry
    key = tl.load(keys + place[:, None] + dims[None, :] * key_dim, mask=seen[:, None], other=0.0)
    if FP32:
        key = key.to(tl.float32)
    similarity = tl.dot(key, query)
    # NaN stays NaN.
    similarity = tl.where(similarity < 0.0, 0.0, similarity) * weight[None, :]
    score = tl.sum(tl.reshape(similarity, (BLOCK, QUERIES, HEADS)), axis=2)
    to = scores + row.to(tl.int64)[None, :] * scores_row + entry[:, None]
    tl.store(to, score, mask=seen[:, None] & (row < rows)[None, :])


@triton.jit(do_not_specialize=[
    "table_row", "first_score", "token_start", "rows", "sequence_row", "start_position", "picks", "splits",
])  # fmt: skip
def _scores_kernel(
    q, weights, keys, table, scores,
    q_row, q_head, q_dim, weights_row, weights_head, key_block, key_entry, key_dim, table_row, table_col, scores_row,
    first_score, token_start, rows, sequence_row, start_position, picks, splits,
    KPOOL: tl.constexpr, PER_BLOCK: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    # The last queries see most, so they come first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    split = tl.program_id(1)
    visible = (start_position + tl.minimum(first + QUERIES, rows)) // KPOOL
    if visible > picks:
        column, dims = tl.arange(0, QUERIES * HEADS), tl.arange(0, DIM)
        token = first + column // HEADS
        true = token < rows
        token = (token_start + token).to(tl.int64)
        head = column % HEADS
        query = tl.load(
            q + (token * q_row + head * q_head)[None, :] + dims[:, None] * q_dim, mask=true[None, :], other=0.0
        )
        weight = tl.load(weights + token * weights_row + head * weights_head, mask=true, other=0.0).to(tl.float32)
        if FP32:
            query = query.to(tl.float32)
        table += sequence_row.to(tl.int64) * table_row
        scores += first_score.to(tl.int64) * scores_row
        row = first + tl.arange(0, QUERIES)
        tiles = (visible + BLOCK - 1) // BLOCK
        page = _pages(table, split, visible, table_col, PER_BLOCK, BLOCK)
        if FP32:
            # The interpreter has no range over values that it read.
            tile = split
            while tile < tiles:
                page = _pages(table, tile, visible, table_col, PER_BLOCK, BLOCK)
                _score_tile(tile, page, query, weight, keys, scores, row, rows, visible, scores_row, key_block,
                            key_entry, key_dim, PER_BLOCK, HEADS, DIM, QUERIES, BLOCK, FP32)  # fmt: skip
                tile += splits
        else:
            for tile in range(split, tiles, splits):
                _score_tile(tile, page, query, weight, keys, scores, row, rows, visible, scores_row, key_block,
                            key_entry, key_dim, PER_BLOCK, HEADS, DIM, QUERIES, BLOCK, FP32)  # fmt: skip
                page = _pages(table, tile + splits, visible, table_col, PER_BLOCK, BLOCK)


def takes(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, table: torch.Tensor, picks: int) -> bool:
    """Whether the kernels are made for these: what the decode's take, and picks that fit whatever the context is."""
    return triton_decode.takes(q, weights, keys, table, picks) and whole_block(picks) <= MAX_BLOCK


def cut_runs(
    segments: Sequence[Segment], *, kpool: int, row_bytes: int, entry_bytes: int, scratch_bytes: int
) -> Iterator[list[Segment]]:
    """Cut segments into runs of consecutive tokens whose scores fit ``scratch_bytes``, or that are one token.

    Args:
        row_bytes, entry_bytes: scratch of a token, and of each entry that the run's longest segment sees.
    Yields:
        Pieces of segments, in token order.
    """
    run: list[Segment] = []
    tokens = widest = 0
    for segment in segments:
        done = 0
        while done < segment.length:
            wide = max(widest, segment.end_position // kpool)
            room = scratch_bytes // (row_bytes + entry_bytes * wide) - tokens
            if room <= 0 and run:
                yield run
                run, tokens, widest = [], 0, 0
                continue
            part = min(max(room, 1), segment.length - done)
            start = segment.start_position + done
            run.append(Segment(segment.token_start + done, part, segment.sequence_row, start))
            tokens, widest, done = tokens + part, wide, done + part
    if run:
        yield run


def score_segment(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    scores: torch.Tensor,
    segment: Segment,
    *,
    block_table: torch.Tensor,
    first_score: int,
    picks: int,
    kpool: int,
    plan: PrefillPlan = DEFAULT_PLAN,
) -> None:
    """Fill rows of ``scores`` [T, N] fp32 from ``first_score`` on, without ``scale``, for one sequence's tokens.

    Tokens that see at most ``picks`` entries may be left out; of others all entries that they see are written.
    """
    heads, dim = q.shape[1:]
    visible = segment.end_position // kpool
    if visible <= picks:
        return
    queries = max(1, plan.columns // heads)
    programs = triton.cdiv(segment.length, queries)
    splits = max(1, min(triton.cdiv(visible, plan.block), _PROGRAMS // programs))
    _scores_kernel[programs, splits](
        q, weights, keys, block_table, scores, *q.stride(), *weights.stride(), *keys.stride(), *block_table.stride(),
        scores.stride(0), first_score, segment.token_start, segment.length, segment.sequence_row,
        segment.start_position, picks, splits, KPOOL=kpool, PER_BLOCK=keys.shape[1], HEADS=heads, DIM=dim,
        QUERIES=queries, BLOCK=plan.block, FP32=INTERPRETED, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip


def select_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    *,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    segments: Sequence[Segment],
    num_decode: int,
    topk: int,
    kpool: int,
    scale: float,
    out: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    scratch_bytes: int | None = None,
    scoring: PrefillPlan = DEFAULT_PLAN,
    selecting: SelectPlan | None = None,
) -> None:
    """As ``torch_impl.select_topk``, for what ``takes`` accepts.

    ``scratch_bytes`` bounds the scores and candidates of a run of tokens, unless it is a single one; where several
    programs share a row's selection, their lists, at most 530, come on top.
    """
    assert topk % kpool == 0, f"top-k of {topk} tokens is no whole number of pools of {kpool}"
    assert scale > 0, f"scale {scale} would change the order of scores"
    assert out.shape[1] == topk + kpool - 1, f"top-k rows of {out.shape[1]}, need {topk + kpool - 1}"
    if cos is not None and sin is not None:
        turned = apply_rope(q[..., : 2 * cos.shape[1]], cos, sin, interleaved=interleaved)
        q = torch.cat([turned, q[..., 2 * cos.shape[1] :]], dim=-1)
    picks, per_block, lens = topk // kpool, keys.shape[1], positions + 1
    length = decode_length(segments, num_decode)
    decodes = num_decode * length
    if decodes:
        table = block_table[segments[0].sequence_row :][:num_decode]
        triton_decode.select_topk_decode(
            q[:decodes],
            weights[:decodes],
            keys,
            block_table=table if length == 1 else table.repeat_interleave(length, dim=0),
            context_lens=lens[:decodes],
            topk=topk,
            kpool=kpool,
            scale=scale,
            out=out[:decodes],
            selecting=selecting or mixed_select_plan(block_table.shape[1] * per_block, picks, rows=decodes),
        )
    prefills = segments[num_decode:]
    longest = max((segment.end_position // kpool for segment in prefills), default=0)
    row_bytes = 64 + 8 * mixed_select_plan(longest, picks, rows=out.shape[0]).merge
    scratch = scratch_of(q, scratch_bytes)
    for run in cut_runs(prefills, kpool=kpool, row_bytes=row_bytes, entry_bytes=4, scratch_bytes=scratch):
        first, tokens = run[0].token_start, sum(piece.length for piece in run)
        widest = max(piece.end_position // kpool for piece in run)
        width = max(-(-widest // 16) * 16, 16)  # so that selections can read whole vectors
        scores = torch.empty(tokens, width, dtype=torch.float32, device=q.device)
        named: dict[str, Any] = {"block_table": block_table, "picks": picks, "kpool": kpool, "plan": scoring}
        for piece in run:
            score_segment(q, weights, keys, scores, piece, first_score=piece.token_start - first, **named)
        rows = slice(first, first + tokens)
        plan = selecting or mixed_select_plan(widest, picks, rows=tokens)
        select_rows(scores, lens[rows], out[rows], picks=picks, kpool=kpool, per_block=per_block, plan=plan)
    done = segments[-1].token_start + segments[-1].length if segments else 0
    if done < out.shape[0]:
        out[done:].fill_(-1)


def mixed_select_plan(entries: int, picks: int, *, rows: int) -> SelectPlan:
    """As ``select_plan``, but of few kinds, whatever the step's longest context is: none is compiled in service."""
    plan = select_plan(max(entries, whole_block(picks)), picks, rows=rows)
    assert plan is not None, f"{picks} picks fit no program"
    return plan
