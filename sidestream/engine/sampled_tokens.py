"""Tokens on their way from the sampler to the host, and to the next step, which needs them before the host does."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sidestream.engine.sampler import Choice, check_peaks
from sidestream.streams import Event, Streams


@dataclass(frozen=True, slots=True)
class _HostSlot:
    """Page-locked memory [rows] for one step's tokens and largest logits, and the event behind the copies."""

    tokens: torch.Tensor
    peaks: torch.Tensor
    allowed: torch.Tensor
    copied: Event


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """One step's tokens while the device may still be working on them."""

    count: int
    masked: bool
    slot: _HostSlot
    streams: Streams

    def read(self) -> list[int]:
        """The tokens, in row order; blocks until they are known.

        Raises:
            AssertionError: a row of logits held NaN or infinity, or nothing finite: only a fault of the model's can do
                that, and no token would be right.
        """
        self.streams.backend.synchronize_event(self.slot.copied)
        slot, count = self.slot, self.count
        peaks, tokens = slot.peaks[:count].tolist(), slot.tokens[:count].tolist()
        allowed = slot.allowed[:count].tolist() if self.masked else None
        check_peaks(peaks, allowed)
        return list(tokens)


class SampledTokens:
    """The last step's tokens on the device, and page-locked memory for the way to the host.

    Args:
        rows: most tokens a step samples.
        depth: steps whose tokens may be unread at once.

    Attributes:
        device: [rows] int64, what the last step sampled.
    """

    def __init__(self, streams: Streams, rows: int, *, depth: int = 2) -> None:
        backend = streams.backend
        self._streams = streams
        self.device = torch.zeros(rows, dtype=torch.int64, device=backend.device)
        self._slots = [
            _HostSlot(
                tokens=backend.host_buffer((rows,), dtype=torch.int64),
                peaks=backend.host_buffer((rows,), dtype=torch.float32),
                allowed=backend.host_buffer((rows,), dtype=torch.float32),
                copied=backend.new_event(external=False),
            )
            for _ in range(depth)
        ]
        self._turn = 0

    def keep(self, choice: Choice) -> PendingTokens:
        """Start the copies, on the current stream."""
        count, slot = choice.tokens.shape[0], self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        self.device[:count].copy_(choice.tokens)
        slot.tokens[:count].copy_(choice.tokens, non_blocking=True)
        slot.peaks[:count].copy_(choice.peaks, non_blocking=True)
        if choice.allowed is not None:
            slot.allowed[:count].copy_(choice.allowed, non_blocking=True)
        self._streams.backend.record(slot.copied)
        return PendingTokens(count, choice.allowed is not None, slot, self._streams)
