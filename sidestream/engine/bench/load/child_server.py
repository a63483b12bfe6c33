"""A ``sidestream serve`` of our own: started for a measurement and stopped after it, whatever happens."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from sidestream.errors import SidestreamError

READY = re.compile(r"ready after .*: (https?://\S+?)/v1")
STOP_SECONDS = 60.0
LAST_LINES = 12


@contextmanager
def child_server(
    options: Sequence[str], *, on_line: Callable[[str], None], on_end: Callable[[int], None] = lambda code: None
) -> Iterator[str]:
    """The address of a server that is ready, on a free port of this machine.

    Args:
        options: of ``sidestream serve``.
        on_line: told of what the server prints until it is ready.
        on_end: told of its exit code, once it was stopped.
    Raises:
        SidestreamError: it ended before it was ready, with its last words.
    """
    command = [sys.executable, "-m", "sidestream.cli.main", "serve", "--port", "0", *options]
    with _sigterm_raises(), subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            address = _address(process, process.stderr, on_line)
            reader = threading.Thread(target=process.stderr.read, daemon=True)  # lest the server waits for one
            reader.start()
            try:
                yield address
            finally:
                _stop(process)
                reader.join()
                on_end(process.wait())
        finally:
            _stop(process)


def _address(process: subprocess.Popen[str], lines: Iterable[str], on_line: Callable[[str], None]) -> str:
    last: deque[str] = deque(maxlen=LAST_LINES)
    for line in lines:
        last.append(line)
        on_line(line.rstrip("\n"))
        if found := READY.search(line):
            return found[1]
    raise SidestreamError(f"the server ended with {process.wait()} before it was ready:\n{''.join(last).rstrip()}")


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl+C does, so that what it started is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
