"""Residency of KV rows in plain Python, one position at a time: the truth.

A request's blocks lie on the device or in the host pool. Rows of host blocks that a step selects are looked up among
the request's hot slots; those that are not there take the slots that were used least recently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Selected:
    """What one step's selection became.

    Attributes:
        rows: a list a selecting row: ("device", block, offset) or ("hot", slot) for each position, in order.
        misses: (position, hot slot) pairs in the order in which they were found.
    """

    rows: list[list[tuple[str, int, int] | tuple[str, int]]] = field(default_factory=list)
    misses: list[tuple[int, int]] = field(default_factory=list)


class HotSlots:
    """Hot slots of one request.

    Attributes:
        owner: slot -> position whose row it holds.
        order: every slot, least recently used first. Slots that one step hits keep their order among themselves, and
            those that it fills come last, in the order in which they were taken.
    """

    def __init__(self, num_slots: int) -> None:
        self.owner: dict[int, int] = {}
        self.order = list(range(num_slots))

    def invalidate(self, positions: Sequence[int]) -> None:
        """These rows were written: a copy of what they were is worth nothing. The slots keep their places."""
        for slot, position in list(self.owner.items()):
            if position in positions:
                del self.owner[slot]

    def select(self, rows: Sequence[Sequence[int]], block_table: Sequence[int], block_size: int) -> Selected:
        """Where the rows of a step's selections are, filling slots with those that are nowhere on the device.

        Args:
            rows: positions that each of the request's rows selects, distinct within a row.
            block_table: device block (0 or more), or -1 - host block.
        """
        slot_of = {position: slot for slot, position in self.owner.items()}
        on_host = [[p for p in row if block_table[p // block_size] < 0] for row in rows]
        hit = {slot_of[p] for row in on_host for p in row if p in slot_of}
        free = [slot for slot in self.order if slot not in hit]
        selected = Selected()
        for asked in on_host:
            for position in asked:
                if position not in slot_of:
                    slot = free[len(selected.misses)]
                    slot_of.pop(self.owner.get(slot, -1), None)
                    self.owner[slot] = position
                    slot_of[position] = slot
                    selected.misses.append((position, slot))
        filled = [slot for _, slot in selected.misses]
        self.order = (
            [slot for slot in free if slot not in filled] + [slot for slot in self.order if slot in hit] + filled
        )
        for row in rows:
            found: list[tuple[str, int, int] | tuple[str, int]] = []
            for position in row:
                block = block_table[position // block_size]
                found.append(("hot", slot_of[position]) if block < 0 else ("device", block, position % block_size))
            selected.rows.append(found)
        return selected
