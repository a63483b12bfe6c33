"""Plain data that the scheduler hands to a step: which tokens of which sequence, in which blocks and slot.

Scheduling reads counts, never token values, so a step can be planned while the one before it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from sidestream.core.outputs import CacheReason

SCRATCH_BLOCK = 0
"""Block that padding rows write to; never owned by a sequence."""
SCRATCH_SLOT = 0
"""State slot of padding rows; never owned by a sequence."""


@dataclass(frozen=True, slots=True)
class Split:
    """The state of linear attention that a sequence has behind ``position`` tokens goes to ``slot``."""

    position: int
    slot: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``[start, start + length)`` of one sequence, to be run in one step.

    ``block_ids`` cover positions ``[0, start + length)``; it is a snapshot, not the scheduler's own list.
    """

    request_id: str
    start: int
    length: int
    block_ids: tuple[int, ...]
    slot: int
    is_decode: bool
    """A continuation of a sequence whose prompt is done: never a first chunk, even when that has one token."""
    samples: bool
    """The chunk reaches the last known token, so a next token is sampled from its last row."""
    splits: tuple[Split, ...] = ()
    """States to be kept of positions inside the chunk, which are the ends of blocks, in order; none of a decode."""

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """The whole state of one slot is copied to another."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that began, or began again after a preemption, with so many of its tokens from the prefix cache."""

    request_id: str
    cached_tokens: int
    reason: CacheReason


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One step's work: decode chunks first (all of one length), then prefill chunks."""

    index: int
    chunks: tuple[Chunk, ...]
    preempted: tuple[str, ...] = ()
    """Requests that lost their blocks and slot when this step was planned; they will be recomputed."""
    admitted: tuple[Admission, ...] = ()
    restores: tuple[SlotCopy, ...] = ()
    """Snapshots that sequences continue from: copied, in order, before the step runs."""
    snapshots: tuple[SlotCopy, ...] = ()
    """States at the ends of chunks that others may continue from: copied, in order, after the step."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)
