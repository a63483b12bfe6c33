"""Bodies of HTTP/1.1 answers: of a known length, in chunks, or up to the end of the connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

MAX_LINE = 4096


class HttpError(Exception):
    """The other side does not speak HTTP as it should."""


class Body(Protocol):
    """Takes what the connection brings, gives the body's bytes."""

    done: bool
    """Whether the body is whole."""

    def feed(self, piece: bytes) -> bytes:
        """The part of the body in this piece; HttpError if it is malformed."""


class LengthBody:
    """So many bytes."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = length == 0

    def feed(self, piece: bytes) -> bytes:
        part = piece[: self._left]
        self._left -= len(part)
        self.done = self._left == 0
        return part


class OpenBody:
    """All bytes until the connection closes, whether it was meant to or not."""

    done = False

    def feed(self, piece: bytes) -> bytes:
        return piece


class ChunkedBody:
    """Chunks, each behind a line with its size, then one of size 0, trailers and an empty line."""

    def __init__(self) -> None:
        self.done = False
        self._rest = b""
        self._left = 0
        self._behind_chunk = self._in_trailers = False

    def feed(self, piece: bytes) -> bytes:
        self._rest += piece
        parts = []
        while self._rest and not self.done:
            if self._left:
                part, self._rest = self._rest[: self._left], self._rest[self._left :]
                self._left -= len(part)
                self._behind_chunk = self._left == 0
                parts.append(part)
            elif not self._line():
                break
        return b"".join(parts)

    def _line(self) -> bool:
        """Take a line that is no data; False if it is not whole yet."""
        line, end, rest = self._rest.partition(b"\r\n")
        if len(line) > MAX_LINE:
            raise HttpError(f"a line of {len(line)} bytes between chunks")
        if not end:
            return False
        self._rest = rest
        if self._in_trailers:
            self.done = not line
        elif self._behind_chunk:
            if line:
                raise HttpError(f"{line[:40]!r} behind a chunk")
            self._behind_chunk = False
        else:
            digits = line.partition(b";")[0].strip()
            if not digits or digits.strip(b"0123456789abcdefABCDEF"):
                raise HttpError(f"{line[:40]!r} is not the size of a chunk")
            self._left = int(digits, 16)
            self._in_trailers = self._left == 0
        return True


def body_for(status: int, headers: Mapping[str, str]) -> Body:
    """The kind that the headers announce; names in lower case."""
    if status in (204, 304):
        return LengthBody(0)
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return ChunkedBody()
    length = headers.get("content-length")
    if length is None:
        return OpenBody()
    if not length.isascii() or not length.isdecimal():
        raise HttpError(f"content-length is {length!r}")
    return LengthBody(int(length))
