"""What ``sidestream serve`` says of itself on stderr: how the start goes, where it listens, how it ends."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from sidestream.engine.startup_clock import PhaseProgress

MAX_LINE = 500
"""Characters of a refused request's line."""


class ServeReport:
    """Implements ``server.run.Watcher``: a bar a phase on a terminal, a line a phase elsewhere.

    The seconds of all phases together are those of the start.
    """

    def __init__(self, model: str, *, file: TextIO | None = None) -> None:
        self._model = model
        self._address = ""
        self._file = file or sys.stderr
        self._console = Console(file=self._file, highlight=False, soft_wrap=True)
        self._bars: Progress | None = None
        if self._console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"), BarColumn(), _Parts(), _Seconds(), console=self._console
            )
        self._origin: float | None = None
        self._running: PhaseProgress | None = None
        self._row: TaskID | None = None

    def __enter__(self) -> ServeReport:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def phase(self, progress: PhaseProgress) -> None:
        if self._running is None or self._running.name != progress.name:
            self._origin = progress.at if self._origin is None else self._origin
            self._close(progress.at)
            self._running = progress
            if self._bars is not None:
                self._row = self._bars.add_task(progress.name, total=progress.total, began=progress.at, seconds=None)
        if self._bars is not None and self._row is not None:
            self._bars.update(self._row, completed=progress.done)

    def listening(self, address: str) -> None:
        self._address = address
        self._say(f"{self._model}: listening on {address}, starting the engine")

    def ready(self, seconds: float) -> None:
        assert self._origin is not None, "a start begins with a phase"
        self._close(self._origin + seconds)
        if self._bars is not None:
            self._bars.stop()
        self._say(f"ready after {seconds:.2f} s: {self._address}/v1, {self._address}/dashboard")

    def load(self, line: str) -> None:
        self._say(line)

    def refused(self, status: int, path: str, message: str) -> None:
        self._say(_printable(f"{status} {path}: {message}"[:MAX_LINE]))

    def answered(self, line: str) -> None:
        self._say(_printable(line))

    def stopping(self, signal_name: str, *, requests: int, limit: int | None) -> None:
        if requests == 0:
            finish = "no request is running"
        else:
            bound = "without a limit" if limit is None else f"for at most {limit} s"
            finish = f"{_count(requests)} may finish, {bound} (--drain-seconds)"
        self._say(f"{signal_name}: accepting no more; {finish}")

    def stopped(self, seconds: float, *, unfinished: int) -> None:
        rest = f"; {_count(unfinished)} cut off by --drain-seconds" if unfinished else ""
        self._say(f"stopped after {seconds:.1f} s{rest}")

    def _close(self, at: float) -> None:
        """The phase that runs has ended."""
        if self._running is None:
            return
        seconds = at - self._running.at
        if self._bars is not None and self._row is not None:
            total = self._running.total
            self._bars.update(self._row, completed=total, seconds=seconds)
        else:
            self._say(f"{self._running.name}: {seconds:.2f} s")

    def _say(self, text: str) -> None:
        """A line; a server whose log nobody reads any more goes on."""
        with suppress(OSError):
            if self._bars is not None and self._bars.live.is_started:
                self._console.print(Text(text))
            else:
                self._file.write(text + "\n")
            self._file.flush()


class _Parts(ProgressColumn):
    """How many parts of how many, where a phase has several."""

    def render(self, task: Task) -> Text:
        total = int(task.total or 1)
        if total == 1:
            return Text("")
        if total >= 2**20:
            return Text(f"{task.completed / 2**20:.0f} of {total / 2**20:.0f} MiB")
        return Text(f"{int(task.completed)} of {total}")


class _Seconds(ProgressColumn):
    """How long a phase took, or has taken so far."""

    def render(self, task: Task) -> Text:
        seconds = task.fields["seconds"]
        if seconds is None:
            seconds = task.get_time() - task.fields["began"]
        return Text(f"{seconds:.2f} s", style="progress.elapsed")


def _printable(line: str) -> str:
    """What came from a client moves no cursor and begins no line."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)


def _count(requests: int) -> str:
    return "1 request" if requests == 1 else f"{requests} requests"
