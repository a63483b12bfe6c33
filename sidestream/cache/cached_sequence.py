"""What the prefix cache knows of an unfinished sequence, and what that can take over."""

from __future__ import annotations

from dataclasses import dataclass

from sidestream.cache.block_hashes import BlockHashes
from sidestream.cache.prefix_tree import PrefixNode, Producer
from sidestream.core.outputs import CacheReason


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest prefix that a sequence can take over now.

    Attributes:
        num_tokens: whole blocks, less than the known tokens: the last of them is always computed.
        blocks: that hold them.
        snapshot: slot with the state behind them, where the model needs it.
        num_found: cached blocks in a row, usable or not.
        reason: why it is not longer.
    """

    num_tokens: int = 0
    blocks: tuple[int, ...] = ()
    snapshot: int | None = None
    num_found: int = 0
    reason: CacheReason = CacheReason.NOTHING_LONGER


class CachedSequence(Producer):
    """An unfinished sequence as the prefix cache sees it.

    Attributes:
        num_published: blocks of its path that the pool may find, from the front.
        unnamed: (blocks, slot) of snapshots within its prompt that are kept, and not entered yet.
        pending: (blocks, slot) of snapshots whose last tokens are not known yet.
        generated: where its last snapshot of generated tokens is kept.
    """

    __slots__ = ("generated", "num_published", "pending", "unnamed")

    def __init__(self, hashes: BlockHashes) -> None:
        super().__init__(hashes)
        self.num_published = 0
        self.unnamed: list[tuple[int, int]] = []
        self.pending: list[tuple[int, int]] = []
        self.generated: PrefixNode | None = None
