"""A server that answers as it is told to, wrongly if need be: what it writes is up to the test, byte for byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ssl import SSLContext
from typing import Any

MODELS = {"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "a test"}]}

VERSION = {"version": "0.33.0"}


@dataclass(frozen=True)
class Asked:
    """One request as it came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


Handler = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


class FakeServer:
    """Keeps what was asked; ``/v1/models``, ``/version`` and ``/tokenize`` are answered by itself.

    Args:
        count: tokens of the body of ``/tokenize``; without it there is no such path.
    """

    def __init__(self, handler: Handler, count: Callable[[Any], int] | None = None) -> None:
        self.asked: list[Asked] = []
        self._count = count
        self.url = ""
        self._handler = handler

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = await _read(reader)
            if asked.path == "/v1/models":
                writer.write(whole(200, MODELS))
            elif asked.path == "/version":
                writer.write(whole(200, VERSION))
            elif asked.path == "/tokenize":
                answer = (404, {}) if self._count is None else (200, {"count": self._count(asked.body)})
                writer.write(whole(*answer))
            else:
                self.asked.append(asked)
                await self._handler(asked, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = dict(line.split(": ", 1) for line in lines)
    data = await reader.readexactly(int(headers["content-length"]))
    return Asked(method, path, headers, json.loads(data) if data else None)


@asynccontextmanager
async def fake_server(
    handler: Handler, *, ssl: SSLContext | None = None, count: Callable[[Any], int] | None = None
) -> AsyncIterator[FakeServer]:
    fake = FakeServer(handler, count)
    server = await asyncio.start_server(fake.connected, "127.0.0.1", 0, ssl=ssl)
    fake.url = f"{'http' if ssl is None else 'https'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.close()


def whole(status: int, content: Any) -> bytes:
    """An answer in one piece; JSON unless it is bytes."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    kind = "text/plain" if isinstance(content, bytes) else "application/json"
    return f"HTTP/1.1 {status} Any\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):X}\r\n".encode() + data + b"\r\n"


def event(content: Any) -> bytes:
    """The lines of one event; text stands as it is."""
    data = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return f"data: {data}\n\n".encode()


def text_event(text: str, *, reason: str | None = None, usage: dict[str, Any] | None = None) -> dict[str, Any]:
    """Of a completion."""
    found: dict[str, Any] = {"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": reason}]}
    return found if usage is None else found | {"usage": usage}


def usage(prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, **more}


def stream(events: Sequence[Any], *, done: bool = True, end: bytes = END) -> bytes:
    """A whole answer of events, each a chunk."""
    parts = [event(content) for content in events] + ([event("[DONE]")] if done else [])
    return HEAD + b"".join(map(chunk, parts)) + end


def says(data: bytes) -> Handler:
    """Answers every request with these bytes, then closes."""

    async def handler(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return handler


def says_each(*answers: bytes) -> Handler:
    """The n-th request gets the n-th answer."""
    left = list(answers)

    async def handler(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(left.pop(0))

    return handler


def says_bytewise(data: bytes) -> Handler:
    """One byte at a time, each given to the network before the next."""

    async def handler(asked: Asked, writer: asyncio.StreamWriter) -> None:
        for i in range(len(data)):
            writer.write(data[i : i + 1])
            await writer.drain()
            await asyncio.sleep(0)

    return handler


GOOD = stream(
    [
        text_event("zwölf"),
        text_event(" Füchse 🦊"),
        text_event(".", reason="length"),
        {"choices": [], "usage": usage(7, 12)},
    ]
)
"""Twelve tokens in three events."""
CUT = HEAD + chunk(event(text_event("a")))
"""A stream that breaks off."""
