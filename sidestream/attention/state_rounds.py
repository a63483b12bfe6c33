"""Parts of a step that linear attention runs one after the other, so that states between them can be kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sidestream.core.batch import Chunk, SlotCopy
from sidestream.core.ring import RingPlan, plan_ring
from sidestream.core.step_inputs import StateRound

Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlannedRound:
    """A ``StateRound`` whose tensors are still on the host.

    Attributes:
        rows: None where the pieces' rows stand together, from ``first`` on.
        slots, starts: [R].
    """

    rows: Array | None
    first: int
    conv: RingPlan
    slots: Array
    starts: Array
    lengths: tuple[int, ...]
    num_decode: int
    kept: tuple[SlotCopy, ...]

    def arrays(self) -> list[Array]:
        """What has to be brought to the device."""
        own = [self.slots, self.starts, *(tensor.numpy() for tensor in self.conv.tensors)]
        return own if self.rows is None else [self.rows, *own]

    def placed(self, tensors: Iterator[torch.Tensor]) -> StateRound:
        """Over the tensors of ``arrays``, taken from the iterator."""
        together = slice(self.first, self.first + sum(self.lengths))
        rows = together if self.rows is None else next(tensors)
        slots, starts = next(tensors), next(tensors)
        return StateRound(
            rows=rows,
            conv=self.conv.moved([next(tensors) for _ in self.conv.tensors]),
            slots=slots,
            starts=starts,
            host_slots=tuple(self.slots.tolist()),
            host_starts=tuple(self.starts.tolist()),
            lengths=self.lengths,
            num_decode=self.num_decode,
            kept=self.kept,
        )


def plan_rounds(chunks: Sequence[Chunk], *, window: int, ring_length: int) -> list[PlannedRound]:
    """Round n runs the n-th piece of every chunk that has so many; splits are where pieces end.

    Args:
        chunks: of a step, in the order of their rows.
        window, ring_length: of the short convolution.
    Returns:
        Nothing if no chunk is split.
    """
    rounds: list[PlannedRound] = []
    most = max((len(chunk.splits) for chunk in chunks), default=0)
    for turn in range(most + 1 if most else 0):
        pieces: list[tuple[Chunk, int, int, int]] = []  # with its first row, first position, tokens
        row = 0
        for chunk in chunks:
            cuts = (chunk.start, *(split.position for split in chunk.splits), chunk.end)
            if turn + 1 < len(cuts):
                pieces.append((chunk, row + cuts[turn] - chunk.start, cuts[turn], cuts[turn + 1] - cuts[turn]))
            row += chunk.length
        assert all(piece[3] > 0 for piece in pieces), f"splits are not inside their chunks: {chunks}"
        rounds.append(_plan_round(pieces, turn, window=window, ring_length=ring_length))
    return rounds


def _plan_round(
    pieces: Sequence[tuple[Chunk, int, int, int]], turn: int, *, window: int, ring_length: int
) -> PlannedRound:
    owners, firsts, starts, lengths = zip(*pieces, strict=True)
    slots = [chunk.slot for chunk in owners]
    together = firsts[-1] + lengths[-1] - firsts[0] == sum(lengths)
    rows = [np.arange(first, first + length) for first, length in zip(firsts, lengths, strict=True)]
    splits = [(chunk.slot, chunk.splits[turn].slot) for chunk in owners if turn < len(chunk.splits)]
    return PlannedRound(
        rows=None if together else np.concatenate(rows),
        first=firsts[0],
        conv=plan_ring(starts, lengths, slots, window=window, ring_length=ring_length),
        slots=np.array(slots, dtype=np.int64),
        starts=np.array(starts, dtype=np.int64),
        lengths=lengths,
        num_decode=sum(chunk.is_decode for chunk in owners),
        kept=tuple(SlotCopy(source, target) for source, target in splits),
    )
