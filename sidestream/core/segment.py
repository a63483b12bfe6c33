"""Host-side description of the tokens that one sequence brings to a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """Flat token rows ``[token_start, token_start + length)`` are one sequence's, from ``start_position`` on."""

    token_start: int
    length: int
    sequence_row: int
    """Row of the step's block table."""
    start_position: int

    @property
    def end_position(self) -> int:
        return self.start_position + self.length
