"""Where the last tokens of each sequence live: a ring of rows a slot, addressed by position alone.

The short convolution of KDA and the unfinished pool of the indexer both need the last few inputs of a sequence. Each
slot owns ``length`` rows and the token at position p is kept in row ``p % length``. Nothing else describes the ring's
state, so taking back n tokens (speculation) is setting a position back, as long as ``length >= window - 1 + n``.

All index arithmetic of a step is done once here, on the host, and shared by every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sidestream.core.batch import Split


@dataclass(frozen=True, slots=True)
class RingPlan:
    """Index tensors (int64) of one step over flat token rows.

    A layer gathers its windows from ``source = cat([zero row, x [T, C], ring[carry_rows] [R * (w - 1), C]])``:
    row 0 stands for positions before the sequence's start (so whatever the slot held is never read), then come the
    step's own tokens, then what earlier steps left in the ring.

    Attributes:
        carry_rows: [R * (window - 1)] flat ring rows (slot * length + row) to gather; a row of slot 0 where the
            position does not exist.
        window_rows: [T, window] rows of ``source``, oldest first, the token itself last.
        keep_tokens: [M] token rows to be kept, and
        keep_rows: [M] the flat ring rows they go to. Each ring row at most once.
        copy_from: [C] ring rows of what earlier steps left, and
        copy_to: [C] ring rows of other slots they go to, before anything else is written. None where there are none.
        keeps_all: ``keep_tokens`` are all tokens in order.
    """

    window: int
    length: int
    carry_rows: torch.Tensor
    window_rows: torch.Tensor
    keep_tokens: torch.Tensor
    keep_rows: torch.Tensor
    copy_from: torch.Tensor | None = None
    copy_to: torch.Tensor | None = None
    keeps_all: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """In the order that ``moved`` takes: four, or six with copies."""
        own = (self.carry_rows, self.window_rows, self.keep_tokens, self.keep_rows)
        return own if self.copy_from is None or self.copy_to is None else (*own, self.copy_from, self.copy_to)

    def moved(self, tensors: Sequence[torch.Tensor]) -> RingPlan:
        """The same plan over copies of its tensors elsewhere."""
        carry_rows, window_rows, keep_tokens, keep_rows, *copies = tensors
        copy_from, copy_to = copies or (None, None)
        own = (carry_rows, window_rows, keep_tokens, keep_rows)
        return RingPlan(self.window, self.length, *own, copy_from, copy_to, self.keeps_all)

    def with_kept(
        self, starts: Sequence[int], lengths: Sequence[int], slots: Sequence[int], kept: Sequence[Sequence[Split]]
    ) -> RingPlan:
        """This plan of the step, on the CPU, which also leaves the ring of every kept state in the slot of that state.

        That are the ``window - 1`` tokens before its position: the step's own, or what the sequence's ring holds.
        """
        tokens, rows, copy_from, copy_to = list[int](), list[int](), list[int](), list[int]()
        ring, first = self.length, 0
        for start, length, slot, splits in zip(starts, lengths, slots, kept, strict=True):
            for split in splits:
                end, target = split.position, split.slot * ring
                begin = max(end - self.window + 1, 0)
                own = max(begin, start)
                tokens += range(first + own - start, first + end - start)
                rows += [target + position % ring for position in range(own, end)]
                if begin < start:
                    copy_from += [slot * ring + position % ring for position in range(begin, start)]
                    copy_to += [target + position % ring for position in range(begin, start)]
            first += length
        return RingPlan(
            self.window,
            self.length,
            self.carry_rows,
            self.window_rows,
            _joined(self.keep_tokens, tokens),
            _joined(self.keep_rows, rows),
            torch.tensor(copy_from) if copy_from else None,
            torch.tensor(copy_to) if copy_to else None,
        )


def _joined(kept: torch.Tensor, more: list[int]) -> torch.Tensor:
    """As lists and by numpy, which is fastest for a few numbers whose code the caches have forgotten."""
    return torch.from_numpy(np.array(kept.tolist() + more, dtype=np.int64))


def plan_ring(
    starts: Sequence[int] | np.ndarray,
    lengths: Sequence[int] | np.ndarray,
    slots: Sequence[int],
    *,
    window: int,
    ring_length: int,
    device: torch.device | None = None,
) -> RingPlan:
    """Plan a step in which sequence r brings tokens ``[starts[r], starts[r] + lengths[r])`` at flat rows in order.

    Args:
        window: taps, the token itself included; >= 1.
        ring_length: rows a slot; at least ``window - 1``.
        device: of the index tensors; None is the CPU.
    """
    assert ring_length >= window - 1, f"a ring of {ring_length} rows cannot carry {window - 1} tokens"
    start = np.asarray(starts, dtype=np.int64)
    length = np.asarray(lengths, dtype=np.int64)
    slot = np.asarray(slots, dtype=np.int64)
    num_tokens = int(length.sum())
    if num_tokens == len(length) and bool((length == 1).all()):
        return _plan_single(start, slot, window=window, ring_length=ring_length, device=device)
    offset, carried = np.cumsum(length) - length, window - 1
    before = start[:, None] + np.arange(-carried, 0)
    carry_rows = np.where(before >= 0, slot[:, None] * ring_length + before % max(ring_length, 1), 0)

    # A token's window lies right in front of it, but for the first few tokens of each sequence.
    window_rows = np.add.outer(np.arange(num_tokens), np.arange(1 - carried, 2))
    sequence, first = np.nonzero(np.arange(carried) < length[:, None])
    place = first[:, None] + np.arange(window)  # within what earlier steps left, as far as that goes
    earlier = np.where(
        start[sequence, None] + place >= carried, 1 + num_tokens + sequence[:, None] * carried + place, 0
    )
    token = offset[sequence] + first
    window_rows[token] = np.where(place < carried, earlier, window_rows[token])

    back = np.arange(-ring_length, 0)
    owner, last = np.nonzero(back + length[:, None] >= 0)
    kept = (offset + length)[owner] + back[last]
    keep_rows = slot[owner] * ring_length + ((start + length)[owner] + back[last]) % max(ring_length, 1)
    return RingPlan(
        window=window,
        length=ring_length,
        carry_rows=torch.from_numpy(carry_rows.reshape(-1)).to(device),
        window_rows=torch.from_numpy(window_rows).to(device),
        keep_tokens=torch.from_numpy(kept).to(device),
        keep_rows=torch.from_numpy(keep_rows).to(device),
        keeps_all=len(kept) == num_tokens,
    )


def _plan_single(
    start: np.ndarray, slot: np.ndarray, *, window: int, ring_length: int, device: torch.device | None
) -> RingPlan:
    """``plan_ring`` of one token a sequence, in fewer steps: every decode needs one."""
    tokens, carried = len(start), window - 1
    rows = slot * ring_length
    own = np.arange(1, tokens + 1)
    window_rows = np.empty((tokens, window), dtype=np.int64)
    window_rows[:, carried] = own
    carry_rows = np.zeros((tokens, carried), dtype=np.int64)
    if carried:
        position = start[:, None] + np.arange(-carried, 0)
        exists = position >= 0
        np.copyto(carry_rows, position % ring_length + rows[:, None], where=exists)
        np.multiply(np.arange(1 + tokens, 1 + tokens * window).reshape(tokens, carried), exists, window_rows[:, :-1])
    kept = own[: tokens if ring_length else 0] - 1
    return RingPlan(
        window=window,
        length=ring_length,
        carry_rows=torch.from_numpy(carry_rows.reshape(-1)).to(device),
        window_rows=torch.from_numpy(window_rows).to(device),
        keep_tokens=torch.from_numpy(kept).to(device),
        keep_rows=torch.from_numpy(rows[kept] + start[kept] % max(ring_length, 1)).to(device),
        keeps_all=len(kept) == tokens,
    )
