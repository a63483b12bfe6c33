"""A streamed completion as raw bytes: a client that costs so little that it is not measured itself."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator

COUNT = re.compile(rb'"completion_tokens":(\d+)')
TAIL = 4096
"""Bytes that hold the last event whole."""


def place_of(address: str) -> tuple[str, int]:
    """Host and port of ``http://host:port``."""
    host, port = address.removeprefix("http://").split(":")
    return host, int(port)


async def completion(
    place: tuple[str, int], prompt: str | list[int], max_tokens: int, *, continuous_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The end of what has come, after each read: ``TAIL`` bytes at most. Closing ends the connection.

    Args:
        continuous_usage: whether every event says how many tokens there are, not the last alone.
    Raises:
        AssertionError: the stream did not end as it should, with its last words.
    """
    options = {"include_usage": True, "continuous_usage_stats": continuous_usage}
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body | {"stream": True, "stream_options": options}).encode()
    reader, writer = await asyncio.open_connection(*place)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {place[0]}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        last = b""
        while piece := await reader.read(1 << 16):
            last = (last + piece)[-TAIL:]
            yield last
        assert b"data: [DONE]" in last, last[-300:]
    finally:
        writer.close()


def tokens_so_far(end: bytes) -> int:
    """What the last event that counts tokens says; 0 if there is none yet."""
    found = COUNT.findall(end)
    return int(found[-1]) if found else 0
