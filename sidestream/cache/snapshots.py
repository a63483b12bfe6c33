"""Ownership of snapshots: slots that keep a copy of a sequence's state as it was at a block boundary.

Pure bookkeeping on integers; the memory lies behind the slots of running sequences in ``sidestream.cache.pools``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

GUESS_SHARE = 4
"""One slot in so many may hold guesses."""


class SnapshotPool:
    """Slots ``first`` to ``first + count - 1``: free, taken (the content is on its way), or kept under a content hash.

    Kept ones are proven, somebody asked for such a state or used this one, or they are guesses. Each kind has its own
    order of use. Guesses hold no more than a quarter of the slots, and make room for each other where they do; they are
    the last to make room for a proven one, so that a crowd of either leaves some of the other.

    What is written in the step being planned is not evicted: the copies of one step are in no order.

    Args:
        on_evict: called with (slot, content hash) when a kept snapshot gives way to another.
    """

    def __init__(self, first: int, count: int, *, on_evict: Callable[[int, bytes], None]) -> None:
        assert count >= 0, f"{count} snapshots"
        self.first = first
        self.count = count
        self.most_guesses = count // GUESS_SHARE
        self._on_evict = on_evict
        self._free = list(range(first + count - 1, first - 1, -1))
        self._taken: set[int] = set()
        self._proven: OrderedDict[int, bytes] = OrderedDict()
        self._guesses: OrderedDict[int, bytes] = OrderedDict()
        self._written: set[int] = set()

    def begin_step(self) -> None:
        """Another step is planned: what the one before writes can be evicted."""
        self._written.clear()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_kept(self) -> int:
        return len(self._proven) + len(self._guesses)

    def take(self, *, guess: bool = False) -> int | None:
        """A slot to be written, free or evicted; None if all that may be evicted are being written."""
        if guess and len(self._guesses) >= self.most_guesses:
            slot = self._evict(self._guesses)
        elif self._free:
            slot = self._free.pop()
        else:
            slot = self._evict(self._proven)
            if slot is None and not guess:
                slot = self._evict(self._guesses)
        if slot is not None:
            self._taken.add(slot)
            self._written.add(slot)
        return slot

    def keep(self, slot: int, content: bytes = b"", *, guess: bool = False) -> None:
        """Keep a taken slot until it is evicted or dropped. Content without a hash yet is to be named before another
        step begins: until then the slot is not evicted."""
        self._taken.remove(slot)
        (self._guesses if guess else self._proven)[slot] = content

    def name(self, slot: int, content: bytes) -> None:
        """What a kept slot holds."""
        (self._guesses if slot in self._guesses else self._proven)[slot] = content

    def touch(self, slot: int) -> None:
        """A kept snapshot was used: it is proven, and the most recently used one."""
        content = self._guesses.pop(slot, None)
        if content is not None:
            self._proven[slot] = content
        self._proven.move_to_end(slot)

    def drop(self, slot: int) -> None:
        """Free a taken or kept slot."""
        if slot in self._taken:
            self._taken.remove(slot)
        else:
            del (self._guesses if slot in self._guesses else self._proven)[slot]
        self._free.append(slot)

    def _evict(self, kept: OrderedDict[int, bytes]) -> int | None:
        """The least recently used of these, unless it is still to be written."""
        slot = next(iter(kept), None)
        if slot is None or slot in self._written:
            return None
        self._on_evict(slot, kept.pop(slot))
        return slot

    def check_integrity(self, *, taken: Collection[int], kept: Collection[tuple[int, bytes]]) -> None:
        """Recount against what the owners hold.

        Raises:
            AssertionError: with the slots that differ.
        """
        assert sorted(taken) == sorted(self._taken), f"slots {sorted(self._taken)} are taken, owners hold {taken}"
        own = sorted([*self._proven.items(), *self._guesses.items()])
        assert sorted(kept) == own, f"kept snapshots are {own}, owners hold {kept}"
        assert len(self._guesses) <= self.most_guesses, f"{len(self._guesses)} guesses, {self.most_guesses} may be"
        slots = sorted([*self._free, *self._taken, *self._proven, *self._guesses])
        assert slots == list(range(self.first, self.first + self.count)), f"snapshot slots are {slots}"
