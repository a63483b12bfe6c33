"""Answers that stop when the client goes away: at any moment, whether something is being sent or not."""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED
from asyncio import wait as first_of
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sidestream.server.errors import ClientGoneError, as_api_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Nobody between server and client may keep or collect events."""

to_json = msgspec.json.Encoder().encode


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled if the client disconnects first.

    Raises:
        ClientGoneError: it did.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await first_of({task, gone}, return_when=FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: one a JSON object, then ``[DONE]``. An error after the first is an event too.

    Args:
        first, events: lists of objects, each list sent at once. ``events`` is closed whatever happens, which aborts
            what it stands for.
        on_gone: called if the client goes away before the end.
    """

    media_type = "text/event-stream"

    def __init__(self, first: list[Any], events: AsyncGenerator[list[Any], None], on_gone: Callable[[], None]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._on_gone = on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except (ClientGoneError, OSError):
            self._on_gone()
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send(send, b"".join(map(_event, self._first)))
        try:
            async for events in self._events:
                await _send(send, b"".join(map(_event, events)))
        except Exception as error:
            known = as_api_error(error)
            await _send(send, _event(known.body), last=True)
            if known.status == 500:
                raise
            return
        await _send(send, DONE, last=True)


async def event_stream(
    receive: Receive, events: AsyncGenerator[list[Any], None], *, on_gone: Callable[[], None]
) -> EventStream:
    """A stream whose first event is there, so that what goes wrong before it still has a status of its own."""
    try:
        first = await unless_gone(receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, on_gone)


def _event(content: Any) -> bytes:
    return b"data: " + to_json(content) + b"\n\n"


async def _send(send: Send, body: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not last})
