"""How long steps of decodes alone take, by how many there are."""

from __future__ import annotations

from collections import deque

KEPT = 5
"""Last steps of each range of sizes whose median counts."""
SETTLED = 3
"""Steps that must have been seen before their median is relied on."""
AGREES = 1.5
"""A step that differs from the median by more than this factor may mean that times have changed."""


class DecodeTimes:
    """Medians of recent steps, in ranges of sizes that double (1, 2 to 3, 4 to 7, ...), and lines between them."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[tuple[float, int]]] = {}
        self._medians: dict[int, tuple[float, int]] = {}
        self._agreed: dict[int, bool] = {}

    def observe(self, num_decodes: int, seconds: float) -> None:
        """A step of so many decodes and nothing else took so long."""
        size = num_decodes.bit_length()
        steps = self._steps.setdefault(size, deque(maxlen=KEPT))
        before = self.expected(num_decodes)
        self._agreed[size] = before is not None and before / AGREES <= seconds <= before * AGREES
        steps.append((seconds, num_decodes))
        self._medians[size] = sorted(steps)[(len(steps) - 1) // 2]

    def expected(self, num_decodes: int) -> float | None:
        """Seconds of such a step; None if none of about that size has been seen."""
        size = num_decodes.bit_length()
        if size not in self._medians:
            return None
        seconds, at = self._medians[size]
        beside = self._medians.get(size + (1 if num_decodes > at else -1)) if num_decodes != at else None
        if beside is None:
            return seconds
        return seconds + (beside[0] - seconds) * (num_decodes - at) / (beside[1] - at)

    def settled(self, num_decodes: int) -> bool:
        """Whether enough steps of about that size have been seen, and the last was as expected."""
        size = num_decodes.bit_length()
        return len(self._steps.get(size, ())) >= SETTLED and self._agreed[size]
