"""Ownership of KV blocks: reference counts, and content hashes by which a later request may find a block again.

Pure bookkeeping on integers; the memory itself is in ``sidestream.cache.pools``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from sidestream.core.batch import SCRATCH_BLOCK
from sidestream.errors import CapacityError


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens, of which block 0 is scratch and never handed out.

    A block with no owner is free. A free block that was published under a content hash keeps its hash, and so its
    content, until it is handed out again: blocks without a hash go first (last released first, which is warm in a
    cache), then hashed ones, least recently used first.

    Args:
        on_evict: called with (block, hash) of a published block that was handed out for other content: at once if it is
            ``urgent``, else by ``settle``, or before anything that could tell the difference.

    Attributes:
        urgent: published blocks on whose content more depends than what ``lookup`` finds; the caller's to add to.
    Raises:
        CapacityError: no block would be left beside the scratch block.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, on_evict: Callable[[int, bytes], None] | None = None
    ) -> None:
        if num_blocks < 2:
            raise CapacityError(
                f"a pool of {num_blocks} KV blocks has none beside the scratch block; at least 2 are needed: raise "
                "num_blocks or memory_limit"
            )
        assert block_size >= 1, f"block_size {block_size}"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._on_evict = on_evict
        self.urgent: set[int] = set()
        self._unsettled: list[int] = []  # handed out, and what they held before is still listed, if they held anything
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks))
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can own."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Hand out ``count`` blocks with one reference each, or None, and nothing changed, if so many are not free."""
        assert count >= 0, f"allocate({count})"
        if count > len(self._free):
            return None
        free, references = self._free, self._references
        blocks = [free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            references[block] = 1
        if self._hash_of:
            self._unsettled += blocks
            if not self.urgent.isdisjoint(blocks):
                for block in self.urgent.intersection(blocks):
                    self._forget(block)
        return blocks

    def settle(self) -> None:
        """Forget what the blocks held that were handed out since: a step that waits for blocks need not wait for it."""
        unsettled, self._unsettled = self._unsettled, []
        for block in unsettled:
            if block in self._hash_of:
                self._forget(block)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block: one that has owners, or a free one that is still published."""
        for block in blocks:
            owned = self._references[block] > 0
            assert owned or block in self._hash_of, f"block {block} has no owner and no content to share"
            if not owned:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take one reference from each block. Of hashed blocks the later ones are evicted first: a chain is only
        useful from its beginning."""
        self.settle()
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is released, but nobody owns it"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, content: bytes) -> int:
        """Let ``lookup`` find an owned, full block by its content.

        Of two blocks of equal content the first stays while it has owners; a free one gives its place to the newer,
        which will be kept longer.

        Returns:
            The block that holds the content from now on.
        """
        if self._unsettled:
            self.settle()
        assert self._references[block] > 0, f"block {block} is published, but nobody owns it"
        assert block not in self._hash_of, f"block {block} is published twice"
        before = self._block_of.get(content)
        if before is not None:
            if self._references[before]:
                return before
            del self._hash_of[before]
            self.urgent.discard(before)
            self._free.move_to_end(before, last=False)
        self._block_of[content] = block
        self._hash_of[block] = content
        return block

    def lookup(self, content: bytes) -> int | None:
        """The block published under a hash, owned or free; ``share`` it before anything else is allocated."""
        self.settle()
        return self._block_of.get(content)

    def holds_content(self, block: int) -> bool:
        """Whether a block has an owner, or content that ``lookup`` finds."""
        return self._references[block] > 0 or block in self._hash_of

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of them have no owner, so that sharing them takes from ``num_free``."""
        return sum(not self._references[block] for block in blocks)

    def check_integrity(self, owned: Mapping[str, Sequence[int]]) -> None:
        """Recount everything against the blocks of each owner.

        Raises:
            AssertionError: with the block and both counts.
        """
        self.settle()
        counts = Counter(block for blocks in owned.values() for block in blocks)
        for name, blocks in owned.items():
            assert len(set(blocks)) == len(blocks), f"{name} owns a block twice: {list(blocks)}"
        assert SCRATCH_BLOCK not in counts, f"the scratch block is owned by {_owners(owned, SCRATCH_BLOCK)}"
        assert SCRATCH_BLOCK not in self._free, "the scratch block is in the free list"
        for block in range(1, self.num_blocks):
            references = self._references[block]
            assert references == counts[block], (
                f"block {block} counts {references} references, its owners are {_owners(owned, block)}"
            )
            assert (references == 0) == (block in self._free), (
                f"block {block} has {references} references and is {'' if block in self._free else 'not '}free"
            )
        assert max(counts, default=0) < self.num_blocks, f"block {max(counts)} is not of this pool"
        assert len(self._free) + len(counts) == self.num_usable, (
            f"{len(self._free)} free and {len(counts)} owned blocks, of {self.num_usable}"
        )
        assert self._block_of == {content: block for block, content in self._hash_of.items()}, "hash maps disagree"
        assert self.urgent <= self._hash_of.keys(), f"blocks {self.urgent - self._hash_of.keys()} hold nothing"

    def _forget(self, block: int) -> None:
        content = self._hash_of.pop(block)
        del self._block_of[content]
        self.urgent.discard(block)
        if self._on_evict is not None:
            self._on_evict(block, content)


def _owners(owned: Mapping[str, Sequence[int]], block: int) -> list[str]:
    return [name for name, blocks in owned.items() if block in blocks]
