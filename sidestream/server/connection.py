"""Connections of the server: uvicorn's, with a bound on the head of a request, which has none there."""

from __future__ import annotations

import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sidestream.server.errors import ApiError

MAX_HEAD_BYTES = 65536
"""Of a request's line and headers; whoever sends more would fill the memory."""


class Connection(HttpToolsProtocol):
    """Answers 431 to a head that does not end, and hangs up."""

    _head_bytes: int | None = 0
    """Received of an unfinished head; None while a body is received, or an answer is awaited."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._head_bytes = None

    def _refuse(self) -> None:
        message = f"the request's line and headers have more than {MAX_HEAD_BYTES} bytes"
        body = json.dumps(ApiError(431, message, code="headers_too_large").body).encode()
        head = f"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        self.transport.close()
