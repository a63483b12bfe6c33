"""Residency in torch, all requests at once; no shape depends on what is found."""

from __future__ import annotations

import torch

OWNER, ORDER, MARK, VICTIM = range(4)
"""Rows of a seat's ``slots``: the position whose row a slot holds, or -1; slots, least recently used first; 1 for a
slot that this step hits, else 0; slots that this step may take, in the order in which it takes them."""


def new_state(
    num_seats: int, num_slots: int, num_positions: int, *, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """State of hot slots: ``slot_of`` [num_seats, num_positions + 1] int32, ``slots`` [num_seats, 4, num_slots] int32.

    A position's entry in ``slot_of`` counts only while that slot's owner is the position, so it is never cleared.
    Its last column is scratch, as is seat 0: padding rows have it, nobody owns it.
    """
    slot_of = torch.full((num_seats, num_positions + 1), -1, dtype=torch.int32, device=device)
    slots = torch.empty((num_seats, 4, num_slots), dtype=torch.int32, device=device)
    clear_seats(slots, torch.arange(num_seats, device=device))
    return slot_of, slots


def clear_seats(slots: torch.Tensor, seats: torch.Tensor) -> None:
    """Forget what the seats' slots hold: for a seat's next owner. ``seats`` [n] int64."""
    fresh = torch.full(slots.shape[1:], -1, dtype=torch.int32, device=slots.device)
    fresh[ORDER] = torch.arange(slots.shape[2], dtype=torch.int32, device=slots.device)
    fresh[MARK] = 0
    slots[seats] = fresh


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
) -> None:
    """Find or make a place on the device for every selected row.

    A request has ``q = T / R`` rows. Rows of host blocks that it holds in no hot slot get one: the least recently used
    of those that this step does not hit. Slots of hits come behind the rest in the order of use, filled ones last.

    Args:
        logical: [T, W] int32 positions, distinct in a row, a valid prefix, then -1. A padding row has none.
        block_table: [rows, B]; a block of the device, or -1 - a block of the host pool.
        slot_of, slots: as ``new_state`` makes them; changed in place.
        seats: [R] int64; a seat belongs to one request only, 0 to padding.
        positions: [T] int64, the positions whose rows this step writes; hot copies of those are dropped.
        table_rows: [T] int64, the block-table row of each row.
        hot_base: row of the KV pool at which the hot slots begin, seat after seat.
        out: [T, W] int64, all written: rows of the KV pool, -1 where ``logical`` is.
        counts: [T] int32, written: valid entries.
        host_rows, hot_rows: [R, M] int64: for each request's misses in the order in which they were found, the row of
            the host pool and the row of the KV pool it must be copied to; written up to the number of misses.
        misses: [R] int32, written: how many.
        totals: [num_seats, 2] int64, added to: rows of host blocks that each seat selected, and how many were missing.
    The caller makes sure that a request's selections never need more slots than a seat has.
    """
    requests, num_slots = seats.shape[0], slots.shape[2]
    shape = (requests, -1)
    asked, valid = logical.long(), logical >= 0
    torch.sum(valid, dim=1, dtype=torch.int32, out=counts)
    invalidate(slot_of, slots, seats=seats, positions=positions.view(shape), where=(counts > 0).view(shape))
    block = block_table[table_rows[:, None], asked.clamp(min=0) // block_size].long()
    row = block * block_size + asked % block_size
    on_host = (valid & (block < 0)).view(shape)
    if on_host.is_cpu and not on_host.any():
        misses.zero_()
        out.copy_(torch.where(valid, row, -1))
        return
    asked, host_row = asked.view(shape), -1 - block
    host_row = (host_row * block_size + logical % block_size).view(shape)
    seat = seats[:, None]
    owner, order = slots[seats, OWNER], slots[seats, ORDER].long()
    slot = slot_of[seat, asked.clamp(min=0)].long()
    hit = on_host & _holds(owner, slot, asked)
    marked = torch.zeros(requests, num_slots + 1, dtype=torch.bool, device=logical.device)
    marked.scatter_(1, torch.where(hit, slot, num_slots), True)
    # Slots that this step may take, in the order of use, and behind them those that it hits.
    by_use = order.gather(1, marked.gather(1, order).to(torch.uint8).argsort(dim=1, stable=True))
    first = _first_of_each(torch.where(on_host & ~hit, asked, -1))
    taken = first.sum(dim=1)
    rank = torch.where(first, first.long().cumsum(dim=1) - 1, num_slots)
    given = by_use.gather(1, rank.clamp(max=num_slots - 1))
    spare = torch.where(first, given, num_slots)
    owner = torch.cat([owner, owner[:, :1]], dim=1).scatter(1, spare, asked.to(owner.dtype))
    slot_of[seat, torch.where(first, asked, slot_of.shape[1] - 1)] = given.to(slot_of.dtype)
    turn = (torch.arange(num_slots, device=logical.device) + taken[:, None]) % num_slots
    slots[seats, OWNER] = owner[:, :num_slots]
    slots[seats, ORDER] = by_use.gather(1, turn).to(slots.dtype)
    misses.copy_(taken)
    totals[seats] += torch.stack([on_host.sum(dim=1), taken], dim=1)
    hot = hot_base + seat * num_slots
    for listed, values in ((host_rows, host_row), (hot_rows, hot + given)):
        merged = torch.cat([listed, listed[:, :1]], dim=1)
        merged.scatter_(1, torch.where(first, rank, listed.shape[1]), values)
        listed.copy_(merged[:, :-1])
    slot = slot_of[seat, asked.clamp(min=0)].long()
    row = torch.where(on_host, hot + slot, row.view(shape))
    out.copy_(torch.where(valid.view(shape), row, -1).view(out.shape))


def invalidate(
    slot_of: torch.Tensor,
    slots: torch.Tensor,
    *,
    seats: torch.Tensor,
    positions: torch.Tensor,
    where: torch.Tensor | None = None,
) -> None:
    """Drop hot copies of rows, because they are written again: ``positions`` [R, n] int64 of the requests in ``seats``
    [R] int64, only where ``where`` [R, n] is set."""
    num_slots = slots.shape[2]
    slot = slot_of[seats[:, None], positions].long()
    owner = slots[seats, OWNER]
    held = _holds(owner, slot, positions)
    stale = torch.where(held if where is None else held & where, slot, num_slots)
    owner = torch.cat([owner, owner[:, :1]], dim=1).scatter(1, stale, -1)
    slots[seats, OWNER] = owner[:, :num_slots]


def _holds(owner: torch.Tensor, slot: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """[R, n]: whether these slots, -1 or any slot, hold these positions."""
    return (slot >= 0) & (owner.gather(1, slot.clamp(min=0)) == position)


def _first_of_each(position: torch.Tensor) -> torch.Tensor:
    """[R, n]: the first entry of each position in its row; -1 is none."""
    ordered, by = position.sort(dim=1, stable=True)
    first = ordered >= 0
    first[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    return torch.zeros_like(first).scatter(1, by, first)
