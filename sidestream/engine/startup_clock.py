"""How long an engine takes to become ready, by phase; the first phase begins with the process."""

from __future__ import annotations

import time

import psutil


class StartupClock:
    """Times the phases of a start, one behind the other.

    Attributes:
        phases: name -> seconds. "imports" is everything from the start of the process to the making of the clock.
    """

    def __init__(self) -> None:
        self._last = time.time()  # a process's start is known by the same clock
        self.phases: dict[str, float] = {"imports": self._last - psutil.Process().create_time()}

    def end(self, phase: str) -> None:
        """The phase that began with the end of the last one is over."""
        now = time.time()
        self.phases[phase] = now - self._last
        self._last = now
