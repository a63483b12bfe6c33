"""Connections of the server: uvicorn's, with a bound on the head of a request, and answers in OpenAI's form."""

from __future__ import annotations

import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sidestream.server.errors import ApiError

MAX_HEAD_BYTES = 65536
"""Of a request's line and headers; whoever sends more would fill the memory."""


class _HeadTooLargeError(Exception):
    """Ends the parsing of a head."""


class Connection(HttpToolsProtocol):
    """Answers 431 to a head that is too large, ended or not, and hangs up; 400 to what is no HTTP."""

    _received: int | None = 0
    """Bytes of an unfinished head before those that are parsed; None while a body is received or an answer awaited."""
    _now = 0
    """Bytes that are parsed."""
    _parsed = 0
    """Bytes of the address and of the headers so far."""

    def data_received(self, data: bytes) -> None:
        self._now = len(data)
        super().data_received(data)
        if self._received is not None:
            self._received += len(data)
            if self._received > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._received = self._parsed = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)  # a colon and a space, and the line's end
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._received = None

    def send_400_response(self, msg: str) -> None:
        """The parser gave up: at a head that it was told is too large, or that is too large for itself."""
        if self._received is not None and max(self._parsed, self._received + self._now) > MAX_HEAD_BYTES:
            self._refuse_head()
        else:
            self._answer("400 Bad Request", ApiError(400, "this is no request of HTTP/1.1", code="invalid_http"))

    def _count(self, size: int) -> None:
        self._parsed += size
        if self._parsed > MAX_HEAD_BYTES:
            raise _HeadTooLargeError

    def _refuse_head(self) -> None:
        message = f"the request's line and headers have more than {MAX_HEAD_BYTES} bytes"
        error = ApiError(431, message, code="headers_too_large")
        self._answer("431 Request Header Fields Too Large", error)

    def _answer(self, status: str, error: ApiError) -> None:
        body = json.dumps(error.body).encode()
        head = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        self.transport.close()
