"""Triton top-k of score rows: short rows in one program's registers, long ones filtered by a threshold first.

A long row is sampled at places spread over it. Where the sample says that a few more entries than are picked reach a
key, all that reach it are kept, in index order, by one or several programs; the one that finishes last, or a second
launch, picks the best among them exactly. The sample decides only what is looked at: should fewer entries than are
picked reach the key, or more than are held at once, the whole row is gone through instead, keeping the best so far.
Programs beyond a row's true length leave at once, so that a graph captured for the longest row costs what is there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sidestream.ops.topk import torch_impl
from sidestream.ops.topk.triton_emit import emit, everything, unfinished
from sidestream.ops.topk.triton_search import LOWEST, key_of_sample, ordered_keys, places_of_best

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Kernels run on a CPU, which launches nothing early."""
MAX_BLOCK = 1 << 15
"""Entries that one program can hold: 32 registers of a thread, and counts that fit 16 bits."""
MAX_SPLITS = 32
_ENOUGH_PROGRAMS = 2 * 132
"""Of an H200: two a multiprocessor."""


@dataclass(frozen=True, slots=True)
class SelectPlan:
    """Launch parameters of one selection. All results are the same under every plan.

    Attributes:
        small: rows of at most this many entries are held whole, a power of two.
        merge: entries that are picked from at once in longer rows, a power of two larger than the picks; 0 if no row is
            longer than ``small``.
        tile: entries that a program filters at a time, a power of two.
        sample: entries that the threshold is estimated from, a power of two.
        splits: programs a row, at most 32.
        warps, pick_warps: of these programs and of the one that picks in a second launch.
        registers: most a thread may have, None for as many as it asks for.
        pdl: launch while the kernel before still runs (programmatic dependent launch), and wait for it there.
        late: then let the kernel behind start as programs end, not at once: early ones take room where there is some.
    """

    small: int
    merge: int
    tile: int
    sample: int
    splits: int
    warps: int
    pick_warps: int = 8
    registers: int | None = None
    pdl: bool = False
    late: bool = False


@lru_cache(maxsize=1024)
def select_plan(entries: int, picks: int, *, rows: int) -> SelectPlan | None:
    """For ``rows`` rows of at most ``entries`` scores; None if so many picks would fit no program.

    What a kernel is compiled for follows from ``picks`` alone once rows are longer than ``small``.
    """
    merge = whole_block(picks)
    small = max(triton.next_power_of_2(min(entries, merge, MAX_BLOCK)), 64)
    if entries <= small:
        # Without a bound one program of 8,192 entries fills the registers of a multiprocessor.
        bound = 128 if small == 8192 and rows > _ENOUGH_PROGRAMS // 2 else None
        return SelectPlan(small, 0, 0, 0, 1, _warps(small), registers=bound, pdl=not INTERPRETED)
    if merge > MAX_BLOCK:
        return None
    tile = 4096
    tiles = triton.cdiv(entries, tile)
    splits = max(1, min(tiles, _ENOUGH_PROGRAMS // rows, MAX_SPLITS))
    splits = triton.cdiv(tiles, triton.cdiv(tiles, splits))  # none without a tile
    # 16 entries a thread: 32 of 8,192 were slower in two sweeps, and a thread spills more in the search.
    warps = max(merge // 512, 8)
    return SelectPlan(small, merge, tile, 2048, splits, warps, merge // 512, None, pdl=not INTERPRETED)


def whole_block(picks: int) -> int:
    """Entries that are held at once for so many picks: what four times as many take, contexts of 8k tokens."""
    return max(2048, 1 << (4 * picks - 1).bit_length())


def _warps(block: int) -> int:
    """16 entries a thread up to 4 warps, 32 from 8 warps on: what is waited for is the latency of reductions."""
    return min(max(block // 1024, min(block // 512, 4), 1), 32)


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
def _filter(
    scores, scores_col, held_keys, held_entries, first, last, threshold, HELD: tl.constexpr, TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Store the first HELD of entries ``first`` to ``last`` that reach the threshold; returns how many there are."""
    found = first * 0
    while first < last:
        here = tl.minimum(last - first, TILE)
        raw = _load_block(scores + first.to(tl.int64) * scores_col, here, scores_col, TILE, ALIGNED)
        keys, step = ordered_keys(raw), tl.arange(0, TILE)
        reaches = (keys >= threshold) & (step < here)
        place = found + tl.cumsum(reaches.to(tl.int32), axis=0) - 1
        kept = reaches & (place < HELD)
        tl.store(held_keys + place, keys, mask=kept)
        tl.store(held_entries + place, first + step, mask=kept)
        found += tl.sum(reaches.to(tl.int32), axis=0)
        first += TILE
    return found


@triton.jit
def _joined_lists(founds, splits, MERGE: tl.constexpr, SPLITS: tl.constexpr):
    """Where in all programs' lists the entries of one block lie, which are there, how many there are, and how many the
    block would have to hold.

    Lists follow each other in the block, each from a multiple of 32 on, so that a search by lists is one by 32 entries.
    Other programs wrote the counts while this one ran: they must not come from this multiprocessor's own cache.
    """
    if SPLITS == 1:
        step = tl.arange(0, MERGE)
        total = tl.load(founds)
        return step, step < total, total, total
    lane = tl.arange(0, SPLITS)
    count = tl.load(founds + lane, mask=lane < splits, other=0, cache_modifier=".cg")
    runs = (count + 31) // 32
    ends = tl.cumsum(runs, axis=0)
    run = tl.arange(0, MERGE // 32)
    # The list of a run is the number of lists that end at or before it: a binary search.
    which = run * 0
    for shift in tl.static_range(1, 6):
        behind = run >= tl.gather(ends, which + (SPLITS >> shift) - 1, 0)
        which += tl.where(behind, SPLITS >> shift, 0)
    inside = (run - tl.gather(ends - runs, which, 0))[:, None] * 32 + tl.arange(0, 32)[None, :]
    there = inside < tl.gather(count, which, 0)[:, None]
    where = tl.reshape(which[:, None] * MERGE + inside, (MERGE,))
    return where, tl.reshape(there, (MERGE,)), tl.sum(count, axis=0), tl.sum(runs, axis=0) * 32


# Whether these pointers are aligned is no reason to compile again: single values, gathers and scattered stores.
@triton.jit(
    do_not_specialize=["capacity", "picks", "splits", "table_row"],
    do_not_specialize_on_alignment=[
        "lens", "out", "held_keys", "held_entries", "founds", "tickets", "table", "physical", "counts",
    ],
)  # fmt: skip
def _select_kernel(
    scores, lens, out, held_keys, held_entries, founds, tickets, table, physical, counts,
    scores_row, scores_col, lens_stride, out_row, out_col, table_row, table_col, rows_row, rows_col, counts_stride,
    capacity, picks, splits,
    KPOOL: tl.constexpr, PER_BLOCK: tl.constexpr, TAIL: tl.constexpr, SMALL: tl.constexpr, MERGE: tl.constexpr,
    TILE: tl.constexpr, SAMPLE: tl.constexpr, SPLITS: tl.constexpr, TICKET: tl.constexpr, WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr, MAP: tl.constexpr, PDL: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        if not LATE:
            gdc_launch_dependents()
    to = (out, table, physical, out_row, out_col, table_row, table_col, rows_row, rows_col)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    # Asked for together with the length, and dropped if that is another: most rows are waited for once, not twice.
    scores += row * scores_row
    early = _load_block(scores, tl.where(split == 0, capacity, 0), scores_col, SMALL, ALIGNED)
    length = tl.load(lens + row * lens_stride)
    if KPOOL == 1:
        length = tl.minimum(length, capacity)
    length = length.to(tl.int32)
    valid = length // KPOOL
    if split == 0:
        if valid <= picks:
            everything(row, length, to, KPOOL, PER_BLOCK, WIDTH, MAP)
        else:
            if KPOOL > 1:
                unfinished(row, length, picks, to, KPOOL, PER_BLOCK, TAIL, MAP)
        if MAP:
            tl.store(counts + row * counts_stride, tl.minimum(length, picks * KPOOL + length % KPOOL))
    if valid > picks:
        if valid <= SMALL:
            if split == 0:
                entries = tl.arange(0, SMALL)
                seen = entries < valid
                keys = tl.where(seen, ordered_keys(early), LOWEST)
                chosen, places = places_of_best(keys, seen, valid, picks)
                emit(chosen, places, entries, row, to, KPOOL, PER_BLOCK, MAP)
        elif MERGE > 0:
            # Rows of programs that have nothing to filter still count themselves.
            share = ((valid + TILE - 1) // TILE + splits - 1) // splits * TILE
            first = tl.minimum(split * share, valid)
            threshold = key_of_sample(scores, scores_col, valid, picks, SAMPLE)
            list_ = row * splits + split
            found = _filter(
                scores, scores_col, held_keys + list_ * MERGE, held_entries + list_ * MERGE,
                first, tl.minimum(first + share, valid), threshold, MERGE, TILE, ALIGNED,
            )  # fmt: skip
            begin = row * (splits + 1)
            tl.store(founds + begin + split, found)
            tl.store(founds + begin + splits, threshold)
            if (SPLITS == 1) | TICKET:
                # Every thread's stores come before this program's ticket, and the last ticket before all loads.
                tl.debug_barrier()
                last = True
                if TICKET:
                    last = tl.atomic_add(tickets + row, 1, sem="acq_rel", scope="gpu") == splits - 1
                    tl.debug_barrier()
                if last:
                    if TICKET:
                        tl.store(tickets + row, 0)
                    _pick(
                        scores, scores_col, held_keys, held_entries, founds + begin, row, valid, picks, splits, to,
                        KPOOL, PER_BLOCK, MERGE, SPLITS, MAP,
                    )  # fmt: skip


@triton.jit
def _pick(
    scores, scores_col, held_keys, held_entries, founds, row, valid, picks, splits, to,
    KPOOL: tl.constexpr, PER_BLOCK: tl.constexpr, MERGE: tl.constexpr, SPLITS: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """Select from a row's filtered entries, or from the whole row if these are too few or too many.

    In the second case the best so far lie in front of the next entries, whose indices are higher, so order is kept.
    """
    held_keys += row * splits * MERGE
    held_entries += row * splits * MERGE
    step = tl.arange(0, MERGE)
    where, there, total, room = _joined_lists(founds, splits, MERGE, SPLITS)
    # What is not there stands between lists: no entry may look like it.
    threshold = tl.load(founds + splits, cache_modifier=".cg")
    filtered = (total >= picks) & (room <= MERGE) & (threshold > LOWEST)
    count = tl.where(filtered, total, valid)
    kept = total * 0
    begin = total * 0
    while begin < count:
        entries = begin + step - kept
        here = kept + tl.minimum(MERGE - kept, count - begin)
        seen = tl.where(filtered, there, step < here)
        old = filtered | (step < kept)
        raw = tl.load(scores + entries.to(tl.int64) * scores_col, mask=seen & (old == 0), other=0.0)
        place = tl.where(filtered, where, step)
        held = tl.load(held_keys + place, mask=seen & old, other=0, cache_modifier=".cg")
        named = tl.load(held_entries + place, mask=seen & old, other=0, cache_modifier=".cg")
        keys = tl.where(seen, tl.where(old, held, ordered_keys(raw)), LOWEST)
        entries = tl.where(old, named, entries)
        best = tl.minimum(picks, here)
        chosen, places = places_of_best(keys, seen, here, best)
        begin += MERGE - kept
        kept = best
        if begin < count:
            tl.debug_barrier()
            tl.store(held_keys + places, keys, mask=chosen)
            tl.store(held_entries + places, entries, mask=chosen)
            tl.debug_barrier()
        else:
            emit(chosen, places, entries, row, to, KPOOL, PER_BLOCK, MAP)


@triton.jit(
    do_not_specialize=["capacity", "picks", "splits", "table_row"],
    do_not_specialize_on_alignment=["lens", "out", "held_keys", "held_entries", "founds", "table", "physical"],
)
def _pick_kernel(
    scores, lens, out, held_keys, held_entries, founds, table, physical,
    scores_row, scores_col, lens_stride, out_row, out_col, table_row, table_col, rows_row, rows_col,
    capacity, picks, splits,
    KPOOL: tl.constexpr, PER_BLOCK: tl.constexpr, SMALL: tl.constexpr, MERGE: tl.constexpr, SPLITS: tl.constexpr,
    MAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The selection from lists, in a launch of its own where there are no tickets to tell which program is last."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    to = (out, table, physical, out_row, out_col, table_row, table_col, rows_row, rows_col)
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lens + row * lens_stride)
    if KPOOL == 1:
        length = tl.minimum(length, capacity)
    valid = length.to(tl.int32) // KPOOL
    if (valid > picks) & (valid > SMALL):
        _pick(
            scores + row * scores_row, scores_col, held_keys, held_entries, founds + row * (splits + 1), row, valid,
            picks, splits, to, KPOOL, PER_BLOCK, MERGE, SPLITS, MAP,
        )  # fmt: skip


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
        tickets: [T] int32, zero before and after, for a plan of several programs a row; without them a second launch
            picks from their lists.
    """
    rows = scores.shape[0]
    if rows == 0 or out.shape[1] == 0:
        return
    held_keys = held_entries = founds = lens
    if plan.merge:
        assert plan.merge > picks, f"{picks} picks of {plan.merge} entries at once"
        lists = rows * plan.splits * plan.merge
        made = torch.empty(2 * lists + rows * (plan.splits + 1), dtype=torch.int32, device=scores.device)
        held_keys, held_entries, founds = made[:lists], made[lists : 2 * lists], made[2 * lists :]
    where = physical if physical is not None else PhysicalRows(lens[:, None], lens[:, None], lens)
    table, found = where.block_table, where.rows
    strides = (*scores.stride(), lens.stride(0), *out.stride(), *table.stride(), *found.stride())
    numbers = (scores.shape[1], picks, plan.splits)
    modes = {"KPOOL": kpool, "PER_BLOCK": per_block, "SMALL": plan.small, "MERGE": plan.merge}
    modes |= {"SPLITS": 1 if plan.splits == 1 else MAX_SPLITS, "MAP": physical is not None}
    modes |= {"PDL": plan.pdl, "launch_pdl": plan.pdl}
    _select_kernel[rows, plan.splits](
        scores, lens, out, held_keys, held_entries, founds, tickets if tickets is not None else founds,
        table, found, where.counts, *strides, where.counts.stride(0), *numbers,
        TAIL=triton.next_power_of_2(kpool), TILE=plan.tile, SAMPLE=plan.sample, WIDTH=out.shape[1],
        TICKET=tickets is not None and plan.splits > 1, ALIGNED=scores.shape[1] % 16 == 0, num_warps=plan.warps,
        LATE=plan.late, maxnreg=plan.registers, **modes,
    )  # fmt: skip
    if plan.splits > 1 and tickets is None:
        _pick_kernel[(rows,)](
            scores, lens, out, held_keys, held_entries, founds, table, found, *strides, *numbers,
            num_warps=plan.pick_warps, **modes,
        )  # fmt: skip


def topk_ascending(scores: torch.Tensor, valid: torch.Tensor, k: int) -> torch.Tensor:
    """As ``torch_impl.topk_ascending``, which also takes over where so many picks fit no program."""
    rows, size = scores.shape
    plan = select_plan(size, k, rows=rows) if k and size and rows else None
    if plan is None or scores.dtype is not torch.float32:
        return torch_impl.topk_ascending(scores, valid, k)
    out = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    tickets = None
    if plan.splits > 1:
        tickets = torch.empty(rows, dtype=torch.int32, device=scores.device)
        _clear[(triton.cdiv(rows, 128),)](tickets, rows, BLOCK=128, PDL=plan.pdl, launch_pdl=plan.pdl, num_warps=1)
    select_rows(scores, valid, out, picks=k, kpool=1, per_block=1, plan=plan, tickets=tickets)
    return out


@triton.jit(do_not_specialize=["rows"])
def _clear(tickets, rows, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Zeros; a kernel, since the next one can start before it ends, as it could not before a memset does."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(tickets + row, 0, mask=row < rows)
