"""Ownership of snapshots: slots that keep a copy of a sequence's state as it was at a block boundary.

Pure bookkeeping on integers; the memory lies behind the slots of running sequences in ``sidestream.cache.pools``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection


class SnapshotPool:
    """Slots ``first`` to ``first + count - 1``: free, taken (the content is on its way), or kept under a content hash.

    A taken slot is never evicted; of the kept ones the least recently used goes first.

    Args:
        on_evict: called with (slot, content hash) when a kept snapshot gives way to another.
    """

    def __init__(self, first: int, count: int, *, on_evict: Callable[[int, bytes], None]) -> None:
        assert count >= 0, f"{count} snapshots"
        self.first = first
        self.count = count
        self._on_evict = on_evict
        self._free = list(range(first + count - 1, first - 1, -1))
        self._taken: set[int] = set()
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def take(self) -> int | None:
        """A slot to be written, free or evicted; None if all of them are being written."""
        if self._free:
            slot = self._free.pop()
        elif self._kept:
            slot, content = self._kept.popitem(last=False)
            self._on_evict(slot, content)
        else:
            return None
        self._taken.add(slot)
        return slot

    def keep(self, slot: int, content: bytes) -> None:
        """Keep a taken slot until it is evicted or dropped."""
        self._taken.remove(slot)
        self._kept[slot] = content

    def touch(self, slot: int) -> None:
        """Make a kept snapshot the most recently used one."""
        self._kept.move_to_end(slot)

    def drop(self, slot: int) -> None:
        """Free a taken or kept slot."""
        if slot in self._taken:
            self._taken.remove(slot)
        else:
            del self._kept[slot]
        self._free.append(slot)

    def check_integrity(self, *, taken: Collection[int], kept: Collection[tuple[int, bytes]]) -> None:
        """Recount against what the owners hold.

        Raises:
            AssertionError: with the slots that differ.
        """
        assert sorted(taken) == sorted(self._taken), f"slots {sorted(self._taken)} are taken, owners hold {taken}"
        assert sorted(kept) == sorted(self._kept.items()), f"kept snapshots are {self._kept}, owners hold {kept}"
        slots = sorted([*self._free, *self._taken, *self._kept])
        assert slots == list(range(self.first, self.first + self.count)), f"snapshot slots are {slots}"
