"""Triton residency: one program a request."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents


@dataclass(frozen=True, slots=True)
class ResolvePlan:
    """Launch parameters of a resolve.

    Attributes:
        once: look a position up once and keep what was found; owners and hits are gathered from shared memory, where a
            random read takes a fraction of its time in global memory.
        early: tell the kernel behind, as soon as victims are known, that it may start (programmatic dependent launch).
    """

    warps: int = 16
    once: bool = False
    early: bool = False


COMPILED = not triton.knobs.runtime.interpret
DEFAULT_PLAN = ResolvePlan(once=True, early=COMPILED)
STRIDES = (
    "logical_row", "table_row", "seat_places", "seat_slots", "out_row", "miss_row", "width", "hot_base", "num_slots"
)  # fmt: skip
"""Not specialised: where the compiler knows that several of them are a multiple of 16, every access gets a layout of
its own, and to change between them takes three times as many barriers."""


@triton.jit
def _held(position, on_host, place, owner, slots):
    """The hot slot that holds each position, and whether one does."""
    slot = tl.load(place + position, mask=on_host, other=-1)
    inside = on_host & (slot >= 0) & (slot < slots)
    return slot, inside & (tl.load(owner + slot, mask=inside, other=-1) == position)


@triton.jit
def _resolve_kernel(
    logical, table, slot_of, slots, seats, positions, table_rows, out, counts, host_rows, hot_rows, misses, totals,
    logical_row, table_row, seat_places, seat_slots, out_row, miss_row, width, hot_base, num_slots,
    ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, W: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + request)
    place = slot_of + seat * seat_places
    owner = slots + seat * seat_slots
    order, marks, victims = owner + num_slots, owner + 2 * num_slots, owner + 3 * num_slots
    hot_base += seat * num_slots
    column = tl.arange(0, W)
    # What is on the device already; marks on the slots that hold the rest.
    asked_of_host = 0
    for t in tl.static_range(ROWS):
        token = request * ROWS + t
        position = tl.load(logical + token * logical_row + column, mask=column < width, other=-1)
        valid = position >= 0
        found = tl.sum(valid.to(tl.int32), axis=0)
        tl.store(counts + token, found)
        written = tl.load(positions + token)
        stale = tl.load(place + written, mask=found > 0, other=-1)
        inside = (stale >= 0) & (stale < num_slots)
        tl.store(owner + stale, -1, mask=inside & (tl.load(owner + stale, mask=inside, other=-1) == written))
        pages = table + tl.load(table_rows + token) * table_row
        block = tl.load(pages + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        at = tl.where(valid, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(out + token * out_row + column, at, mask=(column < width) & (block >= 0))
        asked_of_host += tl.sum((valid & (block < 0)).to(tl.int32), axis=0)
    tl.store(misses + request, 0)
    if asked_of_host > 0:
        tl.debug_barrier()
        for t in tl.static_range(ROWS):
            token = request * ROWS + t
            position = tl.load(logical + token * logical_row + column, mask=column < width, other=-1)
            pages = table + tl.load(table_rows + token) * table_row
            block = tl.load(pages + position // BLOCK_SIZE, mask=position >= 0, other=0).to(tl.int64)
            slot, held = _held(position, (position >= 0) & (block < 0), place, owner, num_slots)
            tl.store(marks + slot, 1, mask=held)
        tl.debug_barrier()
        # Slots that this step may take, in order.
        index = tl.arange(0, N)
        exists = index < num_slots
        by_use = tl.load(order + index, mask=exists, other=0)
        hit = tl.load(marks + by_use, mask=exists, other=0)
        free = exists & (hit == 0)
        free_rank = tl.cumsum(free.to(tl.int32), axis=0) - 1
        hit_rank = tl.cumsum(hit, axis=0) - 1
        num_free = tl.sum(free.to(tl.int32), axis=0)
        tl.store(victims + free_rank, by_use, mask=free)
        tl.debug_barrier()
        taken = 0
        for t in tl.static_range(ROWS):
            token = request * ROWS + t
            position = tl.load(logical + token * logical_row + column, mask=column < width, other=-1)
            pages = table + tl.load(table_rows + token) * table_row
            block = tl.load(pages + position // BLOCK_SIZE, mask=position >= 0, other=0).to(tl.int64)
            on_host = (position >= 0) & (block < 0)
            slot, held = _held(position, on_host, place, owner, num_slots)
            missing = on_host & (held == 0)
            rank = taken + tl.cumsum(missing.to(tl.int32), axis=0) - 1
            given = tl.load(victims + rank, mask=missing, other=0)
            slot = tl.where(missing, given, slot)
            tl.debug_barrier()  # every look-up of this row stands before the changes that it causes
            tl.store(owner + given, position, mask=missing)
            tl.store(place + position, given, mask=missing)
            host = (-1 - block) * BLOCK_SIZE + position % BLOCK_SIZE
            tl.store(host_rows + request * miss_row + rank, host, mask=missing)
            tl.store(hot_rows + request * miss_row + rank, hot_base + given, mask=missing)
            tl.store(out + token * out_row + column, hot_base + slot, mask=on_host)
            taken += tl.sum(missing.to(tl.int32), axis=0)
            tl.debug_barrier()
        tl.store(misses + request, taken)
        so_far = totals + 2 * seat
        tl.store(so_far, tl.load(so_far) + asked_of_host)
        tl.store(so_far + 1, tl.load(so_far + 1) + taken)
        # What was taken comes last: everything turns by as many places.
        place_by_use = tl.where(free, free_rank, num_free + hit_rank) - taken
        to = tl.where(place_by_use < 0, place_by_use + num_slots, place_by_use)
        tl.store(order + to, by_use, mask=exists)
        tl.store(marks + index, 0, mask=exists)


@triton.jit
def _counted(chosen, N: tl.constexpr):
    """How many are chosen up to each of N, itself included. Groups of a warp's width are counted apart first: a scan of
    the whole adds every warp's part to every other's, for each group anew."""
    GROUP: tl.constexpr = 32 if N > 32 else N
    groups = tl.reshape(chosen.to(tl.int32), [N // GROUP, GROUP])
    sums = tl.sum(groups, axis=1)
    before = tl.cumsum(sums, axis=0) - sums
    return tl.reshape(tl.cumsum(groups, axis=1) + before[:, None], [N])


@triton.jit(do_not_specialize=STRIDES)
def _resolve_once_kernel(
    logical, table, slot_of, slots, seats, positions, table_rows, out, counts, host_rows, hot_rows, misses, totals,
    logical_row, table_row, seat_places, seat_slots, out_row, miss_row, width, hot_base, num_slots,
    ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, W: tl.constexpr, N: tl.constexpr, EARLY: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    if EXACT:
        num_slots = N
    request = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + request)
    place = slot_of + seat * seat_places
    owner = slots + seat * seat_slots
    order, marks, victims = owner + num_slots, owner + 2 * num_slots, owner + 3 * num_slots
    hot_base += seat * num_slots
    column = tl.arange(0, W)
    # What is on the device already.
    asked_of_host = 0
    for t in tl.static_range(ROWS):
        token = request * ROWS + t
        position = tl.load(logical + token * logical_row + column, mask=column < width, other=-1)
        valid = position >= 0
        found = tl.sum(valid.to(tl.int32), axis=0)
        tl.store(counts + token, found)
        written = tl.load(positions + token)
        copy = tl.load(place + written, mask=found > 0, other=-1)
        named = (copy >= 0) & (copy < num_slots)
        tl.store(owner + copy, -1, mask=named & (tl.load(owner + copy, mask=named, other=-1) == written))
        pages = table + tl.load(table_rows + token) * table_row
        block = tl.load(pages + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        on_host = valid & (block < 0)
        at = tl.where(valid, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(out + token * out_row + column, at, mask=(column < width) & (block >= 0))
        asked_of_host += tl.sum(on_host.to(tl.int32), axis=0)
    tl.store(misses + request, 0)
    if asked_of_host > 0:
        index = tl.arange(0, N)
        exists = index < num_slots
        owned = tl.load(owner + index, mask=exists, other=-1)
        by_use = tl.load(order + index, mask=exists, other=0)
        for t in tl.static_range(ROWS):  # no barrier since they were dropped in memory, so once more here
            token = request * ROWS + t
            there = tl.load(logical + token * logical_row) >= 0
            owned = tl.where(there & (owned == tl.load(positions + token)), -1, owned)
        # Marks on the slots that hold what is asked of the host.
        for t in tl.static_range(ROWS):
            if ROWS > 1:
                token = request * ROWS + t
                position = tl.load(logical + token * logical_row + column, mask=column < width, other=-1)
                pages = table + tl.load(table_rows + token) * table_row
                block = tl.load(pages + position // BLOCK_SIZE, mask=position >= 0, other=0).to(tl.int64)
                on_host = (position >= 0) & (block < 0)
            slot = tl.load(place + position, mask=on_host, other=-1)
            inside = on_host & (slot >= 0) & (slot < num_slots)
            held = inside & (tl.gather(owned, tl.where(inside, slot, 0), 0) == position)
            tl.store(marks + slot, 1, mask=held)
        tl.debug_barrier()
        marked = tl.load(marks + index, mask=exists, other=0)
        free = exists & (tl.gather(marked, by_use, 0) == 0)
        tl.store(marks + index, 0, mask=marked != 0)
        free_rank = _counted(free, N) - 1
        num_free = tl.sum(free.to(tl.int32), axis=0)
        # Slots that this step may take, in order: no more than it could need.
        tl.store(victims + free_rank, by_use, mask=free & (free_rank < asked_of_host))
        tl.debug_barrier()
        if EARLY:
            gdc_launch_dependents()
        taken = 0
        for t in tl.static_range(ROWS):
            token = request * ROWS + t
            if ROWS > 1:
                position = tl.load(logical + token * logical_row + column, mask=column < width, other=-1)
                pages = table + tl.load(table_rows + token) * table_row
                block = tl.load(pages + position // BLOCK_SIZE, mask=position >= 0, other=0).to(tl.int64)
                on_host = (position >= 0) & (block < 0)
                slot, held = _held(position, on_host, place, owner, num_slots)
            missing = on_host & (held == 0)
            rank = taken + _counted(missing, W) - 1
            given = tl.load(victims + rank, mask=missing, other=0)
            slot = tl.where(missing, given, slot)
            if ROWS > 1:
                tl.debug_barrier()  # every look-up of this row stands before the changes that it causes
            tl.store(owner + given, position, mask=missing)
            tl.store(place + position, given, mask=missing)
            host = (-1 - block) * BLOCK_SIZE + position % BLOCK_SIZE
            tl.store(host_rows + request * miss_row + rank, host, mask=missing)
            tl.store(hot_rows + request * miss_row + rank, hot_base + given, mask=missing)
            tl.store(out + token * out_row + column, hot_base + slot, mask=on_host)
            taken += tl.sum(missing.to(tl.int32), axis=0)
            if ROWS > 1:
                tl.debug_barrier()
        tl.store(misses + request, taken)
        so_far = totals + 2 * seat
        tl.store(so_far, tl.load(so_far) + asked_of_host)
        tl.store(so_far + 1, tl.load(so_far + 1) + taken)
        # What was taken comes last: everything turns by as many places.
        to = tl.where(free, free_rank, num_free + index - free_rank - 1) - taken
        tl.store(order + tl.where(to < 0, to + num_slots, to), by_use, mask=exists)


def resolve(
    logical: torch.Tensor,
    block_table: torch.Tensor,
    slot_of: torch.Tensor,
    slots: torch.Tensor,
    *,
    seats: torch.Tensor,
    positions: torch.Tensor,
    table_rows: torch.Tensor,
    block_size: int,
    hot_base: int,
    out: torch.Tensor,
    counts: torch.Tensor,
    host_rows: torch.Tensor,
    hot_rows: torch.Tensor,
    misses: torch.Tensor,
    totals: torch.Tensor,
    plan: ResolvePlan = DEFAULT_PLAN,
) -> None:
    """As ``torch_impl.resolve``; matrices have rows of unit stride, vectors are contiguous."""
    requests = seats.shape[0]
    if requests == 0 or logical.shape[1] == 0:
        counts.zero_()
        misses.zero_()
        return
    assert logical.stride(1) == block_table.stride(1) == out.stride(1) == 1
    assert host_rows.stride() == hot_rows.stride()
    num_slots = slots.shape[2]
    places = triton.next_power_of_2(num_slots)
    more = {"EARLY": plan.early, "EXACT": num_slots == places} if plan.once else {}
    kernel = _resolve_once_kernel if plan.once else _resolve_kernel
    kernel[(requests,)](
        logical, block_table, slot_of, slots, seats, positions, table_rows, out, counts, host_rows, hot_rows, misses,
        totals, logical.stride(0), block_table.stride(0), slot_of.stride(0), slots.stride(0), out.stride(0),
        host_rows.stride(0), logical.shape[1], hot_base, num_slots,
        ROWS=logical.shape[0] // requests, BLOCK_SIZE=block_size, W=triton.next_power_of_2(logical.shape[1]),
        N=places, num_warps=plan.warps, **more,
    )  # fmt: skip
