"""How long a start takes, by phase: the phases follow one another without a gap, so together they are the whole."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import psutil

T = TypeVar("T")

SERVER_IMPORTS = "server imports"
ENGINE_PROCESS = "engine process"
"""From its start to the first line of its program."""
ENGINE_IMPORTS = "engine imports"
CONFIG = "config"
"""The phase that checks settings and checkpoint: what comes behind it has passed that."""
TELL_SECONDS = 0.1
"""How often, at most, the progress within a phase is told."""


@dataclass(frozen=True, slots=True)
class PhaseProgress:
    """How far a start is.

    Attributes:
        done, total: parts of the phase; 0 of 1 where it has no countable parts.
        at: seconds of ``time.monotonic``, which all processes of a machine share.
    """

    name: str
    done: int
    total: int
    at: float


class StartupClock:
    """Cuts the time since ``origin`` into phases; a moment belongs to the phase that was begun last.

    Args:
        first: the phase that began at ``origin``.
        origin: None is the start of this process.
        tell: hears of every phase as it begins, and of its progress now and then.

    Attributes:
        phases: name -> seconds, in order, of all that have ended; a phase that was begun twice is one entry.
    """

    def __init__(
        self,
        first: str = "imports",
        *,
        origin: float | None = None,
        now: Callable[[], float] = time.monotonic,
        tell: Callable[[PhaseProgress], None] = lambda progress: None,
    ) -> None:
        self.phases: dict[str, float] = {}
        self._now = now
        self._tell = tell
        self._origin = self._began = process_start() if origin is None else origin
        self._told = self._origin
        self._current: str | None = None
        self._total = 1
        self._open(first, 1)

    @property
    def current(self) -> str | None:
        """The phase that runs; None after ``end``."""
        return self._current

    def begin(self, phase: str, *, total: int = 1, at: float | None = None) -> None:
        """The phase before is over, at ``at`` if that is given: another process may have said so a little late."""
        self._close(at)
        self._open(phase, total)

    def advance(self, done: int) -> None:
        """So many parts of the current phase are done."""
        assert self._current is not None, "no phase runs"
        now = self._now()
        if done >= self._total or now - self._told >= TELL_SECONDS:
            self._told = now
            self._tell(PhaseProgress(self._current, min(done, self._total), self._total, now))

    def counting(self, phase: str, total: int) -> Callable[[object], None]:
        """Begin a phase; to be called as often as it has parts."""
        self.begin(phase, total=max(total, 1))
        done = itertools.count(1)
        return lambda part: self.advance(next(done))

    def counted(self, phase: str, parts: Iterable[T], *, then: str) -> Iterator[T]:
        """Begin a phase that goes through ``parts``, and the phase ``then`` behind the last of them."""
        listed = list(parts)
        if listed:
            self.begin(phase, total=len(listed))
        for index, part in enumerate(listed, start=1):
            yield part
            self.advance(index)
        self.begin(then)

    def end(self) -> float:
        """The start is over; seconds since ``origin``, which is the sum of the phases."""
        self._close(None)
        return self._began - self._origin

    def _close(self, at: float | None) -> None:
        """Never before the last boundary nor after now: the sum stays what it is."""
        assert self._current is not None, "the start is over"
        now = self._now()
        boundary: float = now if at is None else min(max(at, self._began), now)
        self.phases[self._current] = self.phases.get(self._current, 0.0) + boundary - self._began
        self._began = boundary
        self._current = None

    def _open(self, phase: str, total: int) -> None:
        self._current, self._total = phase, total
        self._told = self._began
        self._tell(PhaseProgress(phase, 0, total, self._began))


def process_start() -> float:
    """When this process began, in seconds of ``time.monotonic``."""
    return time.monotonic() - (time.time() - float(psutil.Process().create_time()))
