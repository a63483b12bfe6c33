"""Whose hot slots are whose."""

from __future__ import annotations

from collections.abc import Sequence

from sidestream.core.batch import Chunk


class Seats:
    """Hot slots of sequences that decode; seat 0 is scratch.

    A sequence keeps its seat while it decodes step after step. Nobody gives one back: one that is finished, aborted or
    preempted leaves it idle, and a new sequence takes a seat that nobody had or, if there is none, the one that was
    idle for the longest time. A step never takes a seat from a sequence that it runs, however many wait.

    Args:
        num_seats: one more than sequences that a step may run.
    """

    def __init__(self, num_seats: int) -> None:
        self._ends: dict[str, tuple[int, int]] = {}
        """Request -> (seat, position that it continues from), least recently used first."""
        self._free = list(range(num_seats - 1, 0, -1))

    def reset(self) -> None:
        """Nobody has a seat."""
        self._free += [seat for seat, _ in self._ends.values()]
        self._ends.clear()

    def assign(self, chunks: Sequence[Chunk]) -> tuple[list[int], list[int]]:
        """Seats of the chunks, 0 for prefills, and those whose slots must be cleared first: they have a new owner, or
        one that did not go on where it stopped."""
        seats, fresh = [], []
        for chunk in chunks:
            if not chunk.is_decode:
                continue
            had = self._ends.pop(chunk.request_id, None)
            if had is not None:
                self._ends[chunk.request_id] = had  # behind those that this step does not run
        for chunk in chunks:
            if not chunk.is_decode:
                before = self._ends.pop(chunk.request_id, None)
                if before is not None:
                    self._free.append(before[0])
                seats.append(0)
                continue
            had = self._ends.pop(chunk.request_id, None)
            if had is None:
                seat = self._free.pop() if self._free else self._ends.pop(next(iter(self._ends)))[0]
            else:
                seat = had[0]
            if had is None or had[1] != chunk.start:
                fresh.append(seat)
            self._ends[chunk.request_id] = (seat, chunk.end)
            seats.append(seat)
        return seats, fresh
