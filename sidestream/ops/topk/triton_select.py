"""Triton top-k of score rows: short rows in one program each, long ones in chunks whose winners are merged.

A chunk keeps its own best ``picks`` in index order. Since ties go to the lowest index, the order of entries is total,
and the best of all chunks' winners are the best of the row. The chunk that finishes last merges them (``ticket``), or a
second launch does. Programs beyond a row's true length leave at once, so that a graph captured for the longest row
costs what is there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sidestream.ops.topk import torch_impl
from sidestream.ops.topk.triton_search import LOWEST, ordered_keys, places_of_best

MAX_BLOCK = 1 << 15
"""Entries that one program can hold: 32 registers of a thread, and counts that fit 16 bits."""


@dataclass(frozen=True, slots=True)
class SelectPlan:
    """Launch parameters of one selection. All results are the same under every plan.

    Attributes:
        chunk: entries a program takes, a power of two.
        small: rows of at most this many entries are held in a block of this size, the same or smaller.
        chunks: programs a row.
        merge: block that holds all chunks' winners; 0 with one chunk.
        warps, merge_warps: of the chunks' programs and, in a launch of its own, the merging one.
        ticket: the last chunk of a row merges, instead of a second launch.
        pdl: launch while the kernel before still runs (programmatic dependent launch), and wait for it there.
    """

    chunk: int
    small: int
    chunks: int
    merge: int
    warps: int
    merge_warps: int
    ticket: bool
    pdl: bool = False


@lru_cache(maxsize=256)
def select_plan(entries: int, picks: int, *, ticket: bool) -> SelectPlan | None:
    """For rows of at most ``entries`` scores; None if winners of that many would not fit one program."""
    if entries <= 4096:
        block = max(triton.next_power_of_2(entries), 64)
        return SelectPlan(block, block, 1, 0, _warps(block), 0, ticket=False)
    small = 2048 if picks <= 1024 else 8192  # what contexts of 8k tokens take
    for chunk in (8192, 16384, 32768) if picks <= 1024 else (16384, 32768):
        chunks = triton.cdiv(entries, chunk)
        if chunks == 1:
            block = triton.next_power_of_2(entries)
            return SelectPlan(block, min(small, block), 1, 0, _warps(block), 0, ticket=False)
        merge = max(triton.next_power_of_2(chunks * min(picks, chunk)), 64)
        if merge <= MAX_BLOCK and picks < chunk:
            warps = max(_warps(chunk), _warps(merge)) if ticket else _warps(chunk)
            return SelectPlan(chunk, small, chunks, merge, warps, _warps(merge), ticket=ticket)
    return None


def _warps(block: int) -> int:
    """16 entries a thread in at most 32 warps; short rows, whose time is the latency of reductions, 8 or more."""
    return min(max(block // 512, min(block // 256, 8), 4), 32)


@triton.jit
def _emit(chosen, places, entries, row, to, KPOOL: tl.constexpr, PER_BLOCK: tl.constexpr, MAP: tl.constexpr):
    """Write the tokens of chosen entries at their places and, if asked, their physical rows."""
    out, table, physical, out_row, out_col, table_row, table_col, rows_row, rows_col = to
    place = places * KPOOL
    for j in tl.static_range(KPOOL):
        tl.store(out + row * out_row + (place + j) * out_col, entries * KPOOL + j, mask=chosen)
    if MAP:
        page = tl.load(table + row * table_row + (entries // PER_BLOCK) * table_col, mask=chosen, other=0)
        first = (page.to(tl.int64) * PER_BLOCK + entries % PER_BLOCK) * KPOOL
        for j in tl.static_range(KPOOL):
            tl.store(physical + row * rows_row + (place + j) * rows_col, first + j, mask=chosen)


@triton.jit
def _everything(row, length, to, KPOOL: tl.constexpr, PER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, MAP: tl.constexpr):
    """All positions of a short row, -1 behind them."""
    out, table, physical, out_row, out_col, table_row, table_col, rows_row, rows_col = to
    tokens: tl.constexpr = PER_BLOCK * KPOOL
    for start in tl.static_range(0, WIDTH, 1024):
        column = start + tl.arange(0, 1024)
        inside, true = column < WIDTH, column < length
        tl.store(out + row * out_row + column.to(tl.int64) * out_col, tl.where(true, column, -1), mask=inside)
        if MAP:
            page = tl.load(table + row * table_row + (column // tokens) * table_col, mask=true & inside, other=0)
            rows = page.to(tl.int64) * tokens + column % tokens
            place = physical + row * rows_row + column.to(tl.int64) * rows_col
            tl.store(place, tl.where(true, rows, -1), mask=inside)


@triton.jit
def _unfinished(
    row, length, picks, to, KPOOL: tl.constexpr, PER_BLOCK: tl.constexpr, TAIL: tl.constexpr, MAP: tl.constexpr
):
    """The row's own unfinished pool behind what is picked, -1 behind that."""
    out, table, physical, out_row, out_col, table_row, table_col, rows_row, rows_col = to
    valid, step = length // KPOOL, tl.arange(0, TAIL)
    position, column = valid * KPOOL + step, (picks * KPOOL + step).to(tl.int64)
    inside, true = step < KPOOL - 1, position < length
    tl.store(out + row * out_row + column * out_col, tl.where(true, position, -1), mask=inside)
    if MAP:
        where = table + row * table_row + (valid // PER_BLOCK + step * 0) * table_col
        page = tl.load(where, mask=true & inside, other=0)
        rows = (page.to(tl.int64) * PER_BLOCK + valid % PER_BLOCK) * KPOOL + step
        tl.store(physical + row * rows_row + column * rows_col, tl.where(true, rows, -1), mask=inside)


@triton.jit
def _load_block(scores, count, scores_col, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """A row's next BLOCK scores, of which ``count`` are wanted.

    ALIGNED: rows are as long as a multiple of 16, so that reading to the next one is harmless and loads are vectors.
    """
    step = tl.arange(0, BLOCK)
    if ALIGNED:
        count = (count + 15) // 16 * 16
    return tl.load(scores + step.to(tl.int64) * scores_col, mask=step < count, other=0.0)


@triton.jit
def _keys_of(raw, valid, BLOCK: tl.constexpr):
    """Keys of a block of scores, of which ``valid`` are seen."""
    step = tl.arange(0, BLOCK)
    seen = step < valid
    return tl.where(seen, ordered_keys(raw), LOWEST), seen, step


@triton.jit
def _whole(
    raw, row, valid, picks, to,
    KPOOL: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """Select from a row that fits one block."""
    keys, seen, entries = _keys_of(raw, valid, BLOCK)
    chosen, places = places_of_best(keys, seen, valid, picks)
    _emit(chosen, places, entries, row, to, KPOOL, PER_BLOCK, MAP)


@triton.jit
def _merge(
    held_keys, held_entries, row, valid, picks, to,
    HELD: tl.constexpr, KPOOL: tl.constexpr, PER_BLOCK: tl.constexpr, CHUNK: tl.constexpr, MERGE: tl.constexpr,
    MAP: tl.constexpr,
):  # fmt: skip
    """Select from the winners of a row's chunks, which lie densely in index order."""
    full = (valid - 1) // CHUNK
    total = full * picks + tl.minimum(picks, valid - full * CHUNK)
    place = tl.arange(0, MERGE)
    seen = place < total
    # Other programs wrote these while this one ran: they must not come from this multiprocessor's own cache.
    wanted = total
    if HELD % 16 == 0:
        wanted = (total + 15) // 16 * 16  # vectors
    keys = tl.load(held_keys + row * HELD + place, mask=place < wanted, other=LOWEST, cache_modifier=".cg")
    keys = tl.where(seen, keys, LOWEST)
    chosen, places = places_of_best(keys, seen, total, picks)
    entries = tl.load(held_entries + row * HELD + place, mask=chosen, other=0, cache_modifier=".cg")
    _emit(chosen, places, entries, row, to, KPOOL, PER_BLOCK, MAP)


@triton.jit(do_not_specialize=["capacity", "picks"])
def _select_kernel(
    scores, lens, out, held_keys, held_entries, tickets, table, physical, counts,
    scores_row, scores_col, lens_stride, out_row, out_col, table_row, table_col, rows_row, rows_col, counts_stride,
    capacity, picks,
    HELD: tl.constexpr, KPOOL: tl.constexpr, PER_BLOCK: tl.constexpr, TAIL: tl.constexpr, CHUNK: tl.constexpr,
    SMALL: tl.constexpr, MERGE: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, TICKET: tl.constexpr,
    MAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    to = (out, table, physical, out_row, out_col, table_row, table_col, rows_row, rows_col)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    # Asked for together with the length, and dropped if that is another: most rows are waited for once, not twice.
    scores += row * scores_row
    early = _load_block(scores, tl.where(chunk == 0, capacity, 0), scores_col, SMALL, ALIGNED)
    length = tl.load(lens + row * lens_stride)
    if KPOOL == 1:
        length = tl.minimum(length, capacity)
    length = length.to(tl.int32)
    valid = length // KPOOL
    first = chunk * CHUNK
    if chunk == 0:
        if valid <= picks:
            _everything(row, length, to, KPOOL, PER_BLOCK, WIDTH, MAP)
        else:
            if KPOOL > 1:
                _unfinished(row, length, picks, to, KPOOL, PER_BLOCK, TAIL, MAP)
        if MAP:
            tl.store(counts + row * counts_stride, tl.minimum(length, picks * KPOOL + length % KPOOL))
    if (valid > picks) & (first < valid):
        if valid <= SMALL:
            _whole(early, row, valid, picks, to, KPOOL, PER_BLOCK, SMALL, MAP)
        elif SMALL < CHUNK and valid <= CHUNK:
            raw = _load_block(scores, valid, scores_col, CHUNK, ALIGNED)
            _whole(raw, row, valid, picks, to, KPOOL, PER_BLOCK, CHUNK, MAP)
        elif MERGE > 0:
            here = tl.minimum(valid - first, CHUNK)
            begin = scores + first.to(tl.int64) * scores_col
            raw = _load_block(begin, here, scores_col, CHUNK, ALIGNED)
            keys, seen, entries = _keys_of(raw, here, CHUNK)
            chosen, places = places_of_best(keys, seen, here, tl.minimum(picks, here))
            slot = row * HELD + chunk * picks + places
            tl.store(held_keys + slot, keys, mask=chosen)
            tl.store(held_entries + slot, first + entries, mask=chosen)
            if TICKET:
                # Every thread's stores come before this program's ticket, and the last ticket before all loads.
                tl.debug_barrier()
                before = tl.atomic_add(tickets + row, 1, sem="acq_rel", scope="gpu")
                tl.debug_barrier()
                if before == (valid - 1) // CHUNK:
                    tl.store(tickets + row, 0)
                    _merge(held_keys, held_entries, row, valid, picks, to, HELD, KPOOL, PER_BLOCK, CHUNK, MERGE, MAP)


@triton.jit(do_not_specialize=["capacity", "picks"])
def _merge_kernel(
    lens, out, held_keys, held_entries, table, physical,
    lens_stride, out_row, out_col, table_row, table_col, rows_row, rows_col, capacity, picks,
    HELD: tl.constexpr, KPOOL: tl.constexpr, PER_BLOCK: tl.constexpr, CHUNK: tl.constexpr, MERGE: tl.constexpr,
    MAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    to = (out, table, physical, out_row, out_col, table_row, table_col, rows_row, rows_col)
    row = tl.program_id(0).to(tl.int64)
    valid = (tl.load(lens + row * lens_stride) // KPOOL).to(tl.int32)
    if KPOOL == 1:
        valid = tl.minimum(valid, capacity)
    if (valid > picks) & (valid > CHUNK):
        _merge(held_keys, held_entries, row, valid, picks, to, HELD, KPOOL, PER_BLOCK, CHUNK, MERGE, MAP)


@dataclass(frozen=True, slots=True)
class PhysicalRows:
    """Where a selection also writes what ``logical_to_physical`` gives: block table [T, B], rows [T, W], counts [T]."""

    block_table: torch.Tensor
    rows: torch.Tensor
    counts: torch.Tensor


def select_rows(
    scores: torch.Tensor,
    lens: torch.Tensor,
    out: torch.Tensor,
    *,
    picks: int,
    kpool: int,
    per_block: int,
    plan: SelectPlan,
    tickets: torch.Tensor | None = None,
    physical: PhysicalRows | None = None,
) -> None:
    """Fill rows of ``out`` with the tokens of the best ``picks`` entries and of the unfinished pool, -1 behind.

    Args:
        scores: [T, N] fp32, any strides; what stands behind ``lens // kpool`` never matters, nor does a row where that
            is at most ``picks``. ``plan`` was made for N.
        lens: [T] int64 tokens a row sees; at token granularity at most N count.
        out: [T, picks * kpool + kpool - 1] int32, all written.
        per_block: entries a block; matters with ``physical`` only.
        tickets: [T] int32, zero before and after, for a plan with ``ticket``; without them a second launch merges.
    """
    rows = scores.shape[0]
    if rows == 0 or out.shape[1] == 0:
        return
    held = plan.chunks * picks
    if plan.merge:
        held_keys, held_entries = torch.empty(2, rows, held, dtype=torch.int32, device=scores.device).unbind(0)
    else:
        held_keys = held_entries = lens
    if tickets is None:
        plan = replace(plan, ticket=False) if plan.ticket else plan
        tickets = held_keys
    where = physical if physical is not None else PhysicalRows(lens[:, None], lens[:, None], lens)
    table, found = where.block_table, where.rows
    strides = (*out.stride(), *table.stride(), *found.stride())
    modes = {"KPOOL": kpool, "PER_BLOCK": per_block, "CHUNK": plan.chunk, "MERGE": plan.merge}
    modes |= {"HELD": held, "MAP": physical is not None, "PDL": plan.pdl, "launch_pdl": plan.pdl}
    _select_kernel[rows, plan.chunks](
        scores, lens, out, held_keys, held_entries, tickets, table, found, where.counts,
        *scores.stride(), lens.stride(0), *strides, where.counts.stride(0), scores.shape[1], picks,
        TAIL=triton.next_power_of_2(kpool), SMALL=plan.small, WIDTH=out.shape[1],
        ALIGNED=scores.shape[1] % 16 == 0, TICKET=plan.ticket, num_warps=plan.warps, **modes,
    )  # fmt: skip
    if plan.merge and not plan.ticket:
        _merge_kernel[(rows,)](
            lens, out, held_keys, held_entries, table, found,
            lens.stride(0), *strides, scores.shape[1], picks, num_warps=plan.merge_warps, **modes,
        )  # fmt: skip


def topk_ascending(scores: torch.Tensor, valid: torch.Tensor, k: int) -> torch.Tensor:
    """As ``torch_impl.topk_ascending``, which also takes over where winners of so long rows fit no program."""
    rows, size = scores.shape
    plan = select_plan(size, k, ticket=False) if k and size and rows else None
    if plan is None or scores.dtype is not torch.float32:
        return torch_impl.topk_ascending(scores, valid, k)
    out = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    select_rows(scores, valid, out, picks=k, kpool=1, per_block=1, plan=plan)
    return out
