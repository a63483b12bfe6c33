"""How long steps take, where they overlap with the planning of others."""

from __future__ import annotations

import time
from collections.abc import Callable


class StepClock:
    """A step takes from the end of the one before it to its own, or from its planning after a pause.

    That is what a stream waits for its next token. Where one step is launched while another runs, there is no closer
    look at it that would not make the host wait.

    Args:
        now: seconds that only grow.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self._paused = True
        self._since: float | None = None

    def begin(self) -> None:
        """Another step may be planned now."""
        if self._paused:
            self._paused = False
            self._since = self.now()

    def end(self, at: float | None) -> float | None:
        """The oldest step has ended.

        Args:
            at: when the host saw it end; None if it did not look, so that nothing is known of this one and the next.
        Returns:
            Seconds that it took, if known.
        """
        since, self._since = self._since, at
        return None if since is None or at is None else at - since

    def pause(self) -> None:
        """Nothing is left to do."""
        self._paused = True
