"""Trials of forms, as the engine sees them: each in a process that is killed when it takes too long.

xgrammar cannot be told to stop. So a form that the engine has not met is first compiled, and followed for a few tokens,
where that can be ended; what passes is compiled here, in about the time that it took there.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Lock

import sidestream
from sidestream.core.structured_outputs import StructuredOutputs
from sidestream.engine.form_grammar import STEP_SECONDS, Outcome, Verdict
from sidestream.engine.trial_process import FORM_BYTES, READY, TRIAL, send_message
from sidestream.errors import RequestError, SidestreamError

PROGRAM = ("-m", "sidestream.engine.trial_process")
START_SECONDS = 120.0
"""For the process to import xgrammar, which takes one or two on an idle machine."""
GRACE_SECONDS = 30.0
"""Beyond a trial's own time, after which its process hangs."""
END_SECONDS = 2.0
WITHOUT_DEVICES_AND_THREADS = {
    "CUDA_VISIBLE_DEVICES": "",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
"""Of the process's environment: it forks, which other threads would not survive."""
TRIES = 3
"""Of a form whose process was killed, by whomever."""


class TooSlowError(Exception):
    """A trial took longer than its ``Attempt`` allows, which is less than the limit of all."""


class CancelledAttemptError(Exception):
    """Nobody waits for the form any more."""


class Attempt:
    """One attempt to have a form compiled, which other threads may cancel.

    Args:
        seconds: that its trial may take, if that is less than the limit of all.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self._lock = Lock()
        self._cancelled = False
        self._connection: socket.socket | None = None

    def cancel(self) -> None:
        """End the trial; one that has not begun does not begin."""
        with self._lock:
            self._cancelled = True
            if self._connection is not None:
                with suppress(OSError):  # the other end went first
                    self._connection.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """CancelledAttemptError if it was cancelled."""
        if self._cancelled:
            raise CancelledAttemptError

    @contextmanager
    def over(self, connection: socket.socket) -> Iterator[None]:
        """Cancel by ending a connection, within."""
        with self._lock:
            self.check()
            self._connection = connection
        try:
            yield
        finally:
            with self._lock:
                self._connection = None


class FormTrials:
    """Tries forms. The process is started with the first, and again after it was killed. Threads may call at once.

    Args:
        describe: makes xgrammar's ``TokenizerInfo`` as JSON.
        limit: seconds for one form.
    """

    def __init__(self, describe: Callable[[], str], *, limit: float) -> None:
        self._describe = describe
        self._limit = limit
        self._lock = Lock()
        self._process: _Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    def check(self, form: StructuredOutputs, attempt: Attempt) -> None:
        """Return if a form may be compiled.

        Raises:
            RequestError: it may not; naming the limit and what moves it.
            TooSlowError, CancelledAttemptError: the attempt ended before that was known.
            SidestreamError: there is no process that could try it.
        """
        seconds = self._limit if attempt.seconds is None else min(attempt.seconds, self._limit)
        verdict = self._verdict(form, seconds, attempt)
        if verdict.outcome is Outcome.SLOW and seconds < self._limit:
            raise TooSlowError
        if verdict.outcome is not Outcome.PASSED:
            raise RequestError(_complaint(form, verdict, self._limit))

    def _verdict(self, form: StructuredOutputs, seconds: float, attempt: Attempt) -> Verdict:
        asked = json.dumps({"form": asdict(form), "seconds": seconds}).encode()
        for _ in range(TRIES):
            process = self._running()
            try:
                said = process.ask(asked, patience=seconds + GRACE_SECONDS, attempt=attempt)
            except OSError:
                said = b""
            attempt.check()
            line, end, _ = said.partition(b"\n")
            if end:
                outcome, why = json.loads(line)
                return Verdict(Outcome(outcome), why)
            self._give_up(process)
        raise SidestreamError(f"the process that tries forms ended {TRIES} times while it tried {_named(form)}")

    def _running(self) -> _Process:
        with self._lock:
            if self._process is None:
                self._process = _Process(self._describe())
            return self._process

    def _give_up(self, process: _Process) -> None:
        """It was killed, or hangs; a trial that others have there is theirs to repeat."""
        with self._lock:
            if self._process is process:
                self._process = None
        process.end()


class _Process:
    """The running process; it ends when this object does.

    Raises:
        SidestreamError: it did not start.
    """

    def __init__(self, info: str) -> None:
        self._control, theirs = socket.socketpair()
        # Numbers below belong to the new process's standard streams; here they are free where those are closed.
        number = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 3)
        theirs.close()
        try:
            self._process = subprocess.Popen(
                [sys.executable, *PROGRAM, str(number)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | WITHOUT_DEVICES_AND_THREADS | {"PYTHONPATH": _import_path()},
                pass_fds=[number],
            )
        finally:
            os.close(number)
        self._sending = Lock()
        self.pid = self._process.pid
        self.end = weakref.finalize(self, _end, self._process, self._control)
        try:
            self._control.settimeout(START_SECONDS)
            send_message(self._control, info.encode())
            ready = self._control.recv(len(READY))
        except OSError:
            ready = b""
        if ready != READY:
            self.end()
            raise SidestreamError(f"the process that tries forms ended at its start: {self._process.returncode}")

    def ask(self, asked: bytes, *, patience: float, attempt: Attempt) -> bytes:
        """What is said of a form; nothing if the process ended first. OSError after ``patience`` seconds too."""
        ours, theirs = socket.socketpair()
        with ours, theirs, attempt.over(ours):
            with self._sending:
                socket.send_fds(self._control, [TRIAL], [theirs.fileno()])
            theirs.close()  # so that this end sees the other's
            ours.settimeout(patience)
            send_message(ours, asked)
            said = bytearray()
            while part := ours.recv(2**16):
                said += part
            return bytes(said)


def _import_path() -> str:
    """Where a new process finds this package, however this one did."""
    return os.pathsep.join(filter(None, [str(Path(sidestream.__file__).parent.parent), os.environ.get("PYTHONPATH")]))


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """By closing its socket; it goes by itself then, unless it hangs."""
    control.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _named(form: StructuredOutputs) -> str:
    """A form in the words of whoever asked for it, who wrote no structural tag for ``tools``."""
    return (
        form.source
        if form.kind == "structural_tag" or form.source != "structured_outputs"
        else f"{form.source} {form.kind}"
    )


def _complaint(form: StructuredOutputs, verdict: Verdict, limit: float) -> str:
    if verdict.outcome is Outcome.REFUSED:
        return f"{form.source} cannot be compiled: {verdict.why}"
    what = _named(form)
    if verdict.outcome is Outcome.SLOW:
        return f"{what} was not compiled and tried within {limit:g} seconds, the limit (max_form_seconds)"
    if verdict.outcome is Outcome.SLOW_STEPS:
        return (
            f"{what} takes {verdict.why} seconds to say which tokens may come next, the limit is {STEP_SECONDS:g}; "
            "make it less ambiguous"
        )
    if verdict.outcome is Outcome.MEMORY:
        return f"{what} takes more than {FORM_BYTES // 2**20} MiB of memory to compile, the limit; make it smaller"
    return f"{what} cannot be compiled: xgrammar ended by {verdict.why}"
