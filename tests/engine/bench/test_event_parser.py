"""Events and bodies that arrive cut anywhere are those that were sent."""

from __future__ import annotations

import pytest

from sidestream.engine.bench.load.event_parser import EventParser
from sidestream.engine.bench.load.http_body import (
    ChunkedBody,
    HttpError,
    LengthBody,
    OpenBody,
    body_for,
)

STREAM = (
    ": a comment\n\n"
    'data: {"text": "größer 東京 🦉"}\n\n'
    "event: message\r\nid: 7\r\ndata:no blank\r\n\r\n"
    "data: two\ndata: lines\n\n"
    "data:  blank kept\r\rretry: 3\n\n"
    "\n\n"
    "data: [DONE]\n\n"
    "data: never ended"
).encode()
EVENTS = ['{"text": "größer 東京 🦉"}'.encode(), b"no blank", b"two\nlines", b" blank kept", b"[DONE]"]


def test_events_cut_anywhere() -> None:
    """Every pair of cuts: within characters, within ``\\r\\n``, within ``data:``."""
    for first in range(len(STREAM)):
        for second in range(first, len(STREAM), 7):
            parser = EventParser()
            pieces = (STREAM[:first], STREAM[first:second], STREAM[second:])
            assert [data for piece in pieces for data in parser.feed(piece)] == EVENTS


def test_events_byte_by_byte() -> None:
    parser = EventParser()
    assert [data for byte in STREAM for data in parser.feed(bytes([byte]))] == EVENTS


def test_a_line_feed_that_comes_late_ends_no_second_line() -> None:
    parser = EventParser()
    assert parser.feed(b"data: one\r") == []
    assert parser.feed(b"\ndata: two\r\n\r") == []
    assert parser.feed(b"\n") == [b"one\ntwo"]


CHUNKED = b"5\r\nhello\r\nA;name=value\r\n, world, a\r\n1\r\n\n\r\n0\r\nx-trailer: 1\r\n\r\nrest"


def test_chunks_cut_anywhere() -> None:
    for first in range(len(CHUNKED)):
        for second in range(first, len(CHUNKED)):
            body = ChunkedBody()
            found = b"".join(body.feed(p) for p in (CHUNKED[:first], CHUNKED[first:second], CHUNKED[second:]))
            assert found == b"hello, world, a\n"
            assert body.done


@pytest.mark.parametrize("end", range(1, len(CHUNKED) - len(b"rest")))
def test_a_body_that_breaks_off_is_not_done(end: int) -> None:
    body = ChunkedBody()
    body.feed(CHUNKED[:end])
    assert not body.done


@pytest.mark.parametrize("wrong", [b"x\r\n", b"\r\n", b"-5\r\n", b"0x5\r\nhello\r\n", b"5\r\nhello!\r\n", b"a" * 5000])
def test_malformed_chunks_are_refused(wrong: bytes) -> None:
    with pytest.raises(HttpError):
        ChunkedBody().feed(wrong)


def test_kinds_of_bodies() -> None:
    length = body_for(200, {"content-length": "5"})
    assert isinstance(length, LengthBody)
    assert (length.feed(b"hel"), length.done) == (b"hel", False)
    assert (length.feed(b"lo!"), length.done) == (b"lo", True)
    assert body_for(204, {}).done
    assert body_for(200, {"content-length": "0"}).done
    assert isinstance(body_for(200, {"transfer-encoding": "Chunked", "content-length": "3"}), ChunkedBody)
    assert isinstance(body_for(200, {}), OpenBody)
    for wrong in ("-1", "five", "", "²"):
        with pytest.raises(HttpError, match="content-length"):
            body_for(200, {"content-length": wrong})
