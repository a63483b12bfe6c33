"""Tensors and host integers that every layer of one step shares: built once, immutable while the step runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sidestream.core.ring import RingPlan
from sidestream.core.segment import Segment


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Which index pools of ``index_kpool`` tokens this step completes.

    Attributes:
        ring: windows of ``kpool`` tokens over the raw tail ring.
        ends: [C] token rows that complete a pool.
        entries: [C] rows of the flat index keys [num_blocks * (block_size // kpool), D] they are written to.
    """

    ring: RingPlan
    ends: torch.Tensor
    entries: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """T true tokens in flat order, padded to Tp rows; R sequences, decodes first.

    Padding rows carry token 0 at position 0 of the scratch block, and belong to block-table row R, which is all
    scratch. Bodies that touch caches work on the T true rows.

    Attributes:
        token_ids, positions, token_rows, slot_mapping: [Tp] int64; ``slot_mapping`` is the KV row to write.
        block_table: [R + 1, B] int64.
        segments: one a sequence, in flat order; the first ``num_decode`` are continuations of one length.
        slots, starts: [R] int64, each sequence's state slot and its first position in this step.
        conv: ring plan of the short convolution, None without KDA layers.
        pools: None without an indexer or at token granularity.
    """

    num_tokens: int
    num_padded_tokens: int
    num_decode: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    token_rows: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    segments: tuple[Segment, ...]
    slots: torch.Tensor
    starts: torch.Tensor
    host_slots: tuple[int, ...]
    conv: RingPlan | None
    pools: PoolPlan | None

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decode * self.decode_length

    @property
    def decode_length(self) -> int:
        """Tokens that each decode brings: 1, or 1 + n when speculated tokens are verified."""
        return self.segments[0].length if self.num_decode else 0
