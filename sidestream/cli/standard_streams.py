"""Standard streams that are closed or broken: what is read or written there ends in one line, as with other tools."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

from sidestream.errors import RequestError


def fill_closed() -> None:
    """Give closed streams a place, which no file or socket that is opened later can then take.

    Reading such an input and writing such an output fail with "Bad file descriptor"; what goes to a closed standard
    error is lost.
    """
    if sys.stdin is None:
        sys.stdin = open(_descriptor(os.O_WRONLY), encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(_descriptor(os.O_RDONLY), "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(_descriptor(os.O_WRONLY), "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def read_stdin() -> str:
    """All of standard input.

    Raises:
        RequestError: it is closed, or is no text.
    """
    try:
        return sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read standard input: {reason(error)}") from error


def reason(error: Exception) -> str:
    """What went wrong, and with which file, without the number of the error."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


def complain(line: str) -> None:
    """Write a line to standard error, if anybody can read it."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def let_go(stream: TextIO) -> None:
    """Write what is left, or drop it: the interpreter, which tries again at its end, is not to complain."""
    try:
        stream.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _descriptor(mode: int) -> int:
    """Nothing, opened the wrong way round, on the lowest free number, which is the stream's own."""
    made = os.open(os.devnull, mode)
    os.set_inheritable(made, True)
    return made
