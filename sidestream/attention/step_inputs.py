"""Builds a step's shared tensors from what the scheduler planned: all index arithmetic, once, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
        host_lengths = [chunk.length for chunk in chunks]
        lengths = np.array(host_lengths, dtype=np.int64)
        tokens, sequences = sum(host_lengths), len(chunks)
        assert tokens == len(token_ids), f"{len(token_ids)} token ids for {tokens} scheduled tokens"
        padded = -(-tokens // ROW_BUCKET) * ROW_BUCKET
        offsets = list(accumulate(host_lengths, initial=0))

        width = max(len(chunk.block_ids) for chunk in chunks)
        block_table = np.full((sequences + 1, width), SCRATCH_BLOCK, dtype=np.int64)
        for row, chunk in enumerate(chunks):
            block_table[row, : len(chunk.block_ids)] = chunk.block_ids

        columns = np.zeros((3, padded), dtype=np.int64)
        token_rows, positions, ids = columns
        ids[:tokens] = token_ids
        token_rows[tokens:] = sequences
        if tokens == sequences:  # one token each: the usual decode
            token_rows[:tokens] = np.arange(sequences)
            positions[:tokens] = starts
        else:
            token_rows[:tokens] = np.repeat(np.arange(sequences), lengths)
            positions[:tokens] = np.arange(tokens) - np.repeat(np.array(offsets[:-1]) - starts, lengths)
        block, place = np.divmod(positions, self.block_size)
        blocks = block_table[token_rows, block]
        slot_mapping = blocks * self.block_size + place

        num_decode = sum(chunk.is_decode for chunk in chunks)
        assert all(chunk.is_decode for chunk in chunks[:num_decode]), "decode chunks must come first"
        assert len(set(host_lengths[:num_decode])) <= 1, f"decode lengths differ: {host_lengths[:num_decode]}"
        slots = tuple(chunk.slot for chunk in chunks)
        rings: dict[int, RingPlan] = {}
        for window in {self.conv_size, self.kpool if self.kpool > 1 else 0} - {0}:
            rings[window] = plan_ring(
                starts, lengths, slots, window=window, ring_length=window - 1 + self.rollback, device=self.device
            )
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
            segments=tuple(
                Segment(start, chunk.length, row, chunk.start)
                for row, (start, chunk) in enumerate(zip(offsets, chunks, strict=False))
            ),
            slots=self._tensor(np.array(slots, dtype=np.int64)),
            starts=self._tensor(starts),
            host_slots=slots,
            conv=rings.get(self.conv_size),
            pools=self._pools(rings[self.kpool], positions[:tokens], blocks[:tokens]) if self.kpool > 1 else None,
        )

    def _pools(self, ring: RingPlan, positions: np.ndarray, blocks: np.ndarray) -> PoolPlan:
        """Pools whose last token is in this step, and where their keys go."""
        ends = np.flatnonzero((positions + 1) % self.kpool == 0)
        entries = blocks[ends] * (self.block_size // self.kpool) + positions[ends] % self.block_size // self.kpool
        return PoolPlan(ring=ring, ends=self._tensor(ends), entries=self._tensor(entries))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
