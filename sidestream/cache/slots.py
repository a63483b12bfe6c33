"""Ownership of state slots: one a running sequence, slot 0 scratch."""

from __future__ import annotations

from collections.abc import Mapping

from sidestream.core.batch import SCRATCH_SLOT
from sidestream.errors import CapacityError


class SlotPool:
    """``num_slots`` slots, of which slot 0 is scratch and never handed out; the last released is handed out first.

    Raises:
        CapacityError: no slot would be left beside the scratch slot.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise CapacityError(
                f"a pool of {num_slots} state slots has none beside the scratch slot; at least 2 are needed: raise "
                "max_num_seqs or memory_limit"
            )
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, SCRATCH_SLOT, -1))
        self._owned = [False] * num_slots

    @property
    def num_usable(self) -> int:
        return self.num_slots - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int | None:
        """Hand out a slot, or None if none is free. Its content is what the last owner left."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._owned[slot] = True
        return slot

    def release(self, slot: int) -> None:
        assert self._owned[slot], f"slot {slot} is released, but nobody owns it"
        self._owned[slot] = False
        self._free.append(slot)

    def check_integrity(self, owned: Mapping[str, int]) -> None:
        """Recount against the slot of each owner.

        Raises:
            AssertionError: with the slots that differ.
        """
        slots = sorted(owned.values())
        assert len(set(slots)) == len(slots), f"a slot has two owners: {dict(owned)}"
        assert SCRATCH_SLOT not in slots, f"the scratch slot is owned: {dict(owned)}"
        counted = [slot for slot, taken in enumerate(self._owned) if taken]
        assert counted == slots, f"slots {counted} count as owned, the owners hold {slots}"
        assert sorted(self._free + slots) == list(range(1, self.num_slots)), (
            f"free slots {sorted(self._free)} and owned slots {slots} are not 1..{self.num_slots - 1}"
        )
