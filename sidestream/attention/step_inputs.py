"""Builds a step's shared tensors from what the scheduler planned: all index arithmetic, once, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sidestream.core.batch import SCRATCH_BLOCK, Chunk
from sidestream.core.ring import RingPlan, plan_ring
from sidestream.core.segment import Segment
from sidestream.core.step_inputs import PoolPlan, StepInputs

ROW_BUCKET = 8
"""Token rows are padded to a multiple of this on a CPU, so that a row's GEMM bits depend less on its neighbours."""


@dataclass(frozen=True, slots=True)
class StepInputsBuilder:
    """The few numbers that a step's layout depends on.

    Attributes:
        block_size: tokens a block.
        conv_size: taps of the short convolution; 0 without KDA layers.
        kpool: tokens an index pool; 1 at token granularity or without an indexer.
        rollback: tokens that a sequence may take back.
    """

    block_size: int
    conv_size: int
    kpool: int
    rollback: int
    device: torch.device

    def build(self, chunks: Sequence[Chunk], token_ids: Sequence[int]) -> StepInputs:
        """Lay out one step.

        Args:
            chunks: decodes first, all of one length.
            token_ids: of all chunks, in order.
        """
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        lengths = np.array([chunk.length for chunk in chunks], dtype=np.int64)
        tokens, sequences = int(lengths.sum()), len(chunks)
        assert tokens == len(token_ids), f"{len(token_ids)} token ids for {tokens} scheduled tokens"
        padded = -(-tokens // ROW_BUCKET) * ROW_BUCKET
        offsets = np.cumsum(lengths) - lengths

        width = max(len(chunk.block_ids) for chunk in chunks)
        block_table = np.full((sequences + 1, width), SCRATCH_BLOCK, dtype=np.int64)
        for row, chunk in enumerate(chunks):
            block_table[row, : len(chunk.block_ids)] = chunk.block_ids

        token_rows = np.full(padded, sequences, dtype=np.int64)
        positions = np.zeros(padded, dtype=np.int64)
        ids = np.zeros(padded, dtype=np.int64)
        token_rows[:tokens] = np.repeat(np.arange(sequences), lengths)
        positions[:tokens] = np.arange(tokens) - np.repeat(offsets - starts, lengths)
        ids[:tokens] = token_ids
        blocks = block_table[token_rows, positions // self.block_size]
        slot_mapping = blocks * self.block_size + positions % self.block_size

        decodes = [chunk.is_decode for chunk in chunks]
        num_decode = sum(decodes)
        assert all(decodes[:num_decode]), "decode chunks must come first"
        assert len(set(lengths[:num_decode].tolist())) <= 1, f"decode lengths differ: {lengths[:num_decode]}"
        segments = tuple(Segment(int(offsets[row]), chunk.length, row, chunk.start) for row, chunk in enumerate(chunks))
        slots = tuple(chunk.slot for chunk in chunks)
        return StepInputs(
            num_tokens=tokens,
            num_padded_tokens=padded,
            num_decode=num_decode,
            token_ids=self._tensor(ids),
            positions=self._tensor(positions),
            token_rows=self._tensor(token_rows),
            slot_mapping=self._tensor(slot_mapping),
            block_table=self._tensor(block_table),
            block_size=self.block_size,
            segments=segments,
            slots=self._tensor(np.array(slots, dtype=np.int64)),
            starts=self._tensor(starts),
            host_slots=slots,
            conv=self._ring(starts, lengths, slots, window=self.conv_size) if self.conv_size else None,
            pools=self._pools(starts, lengths, slots, positions=positions[:tokens], blocks=blocks[:tokens])
            if self.kpool > 1
            else None,
        )

    def _pools(
        self,
        starts: np.ndarray,
        lengths: np.ndarray,
        slots: Sequence[int],
        *,
        positions: np.ndarray,
        blocks: np.ndarray,
    ) -> PoolPlan:
        """Pools whose last token is in this step, and where their keys go."""
        ends = np.flatnonzero((positions + 1) % self.kpool == 0)
        entries = blocks[ends] * (self.block_size // self.kpool) + positions[ends] % self.block_size // self.kpool
        ring = self._ring(starts, lengths, slots, window=self.kpool)
        return PoolPlan(ring=ring, ends=self._tensor(ends), entries=self._tensor(entries))

    def _ring(self, starts: np.ndarray, lengths: np.ndarray, slots: Sequence[int], *, window: int) -> RingPlan:
        return plan_ring(
            starts, lengths, slots, window=window, ring_length=window - 1 + self.rollback, device=self.device
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
