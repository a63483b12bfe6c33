"""How many waiting sequences there are blocks for."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass

from sidestream.cache.block_pool import BlockPool
from sidestream.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRoom:
    """What admission may take of the block pool.

    Attributes:
        blocks: None where no layer keeps blocks.
        watermark: blocks that must stay free.
        alone: nothing runs, so that the first one admitted may have those too.
    """

    blocks: BlockPool | None
    watermark: int
    alone: bool

    def count_fitting(self, served: Listing[Sequence], shares: Listing[int]) -> int | None:
        """How many of the waiting sequences among the served can be admitted; None if all.

        Args:
            served: in the order of turns, with the tokens that each would get.
        """
        pool = self.blocks
        if pool is None:
            return None
        free = pool.num_free
        for sequence, share in zip(served, shares, strict=True):
            if sequence.running:
                free -= pool.blocks_for(sequence.num_computed + share) - len(sequence.block_ids)
        fitting = 0
        for sequence, share in zip(served, shares, strict=True):
            if sequence.running:
                continue
            hit = sequence.hit
            owned = len(hit.blocks) - pool.count_free(hit.blocks)
            end = hit.num_tokens + share
            needed = pool.blocks_for(sequence.prefill_target if sequence.preempted else end) - owned
            if free - needed < (0 if self.alone and fitting == 0 else self.watermark):
                return fitting
            free -= pool.blocks_for(end) - owned
            fitting += 1
        return None
