"""Answers that the server's own end cuts off: they say so, in the form that the client expects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidestream.server.errors import CLIENT_GONE, error_answer, unavailable

EVENTS = b"text/event-stream"


class CutOff:
    """Ends answers that are cancelled, as they are once a drain has lasted long enough: 503 where nothing was sent,
    an error event and no ``[DONE]`` in a stream. It stands outside of everything that answers.

    Args:
        on_error: told status, path and ``_reason`` of every answer that is an error, these among them.
    """

    def __init__(self, app: ASGIApp, *, on_error: Callable[[int, str, str], None]) -> None:
        self._app = app
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started: Message | None = None
        ended = told = False

        async def noted(message: Message) -> None:
            nonlocal started, ended, told
            if message["type"] == "http.response.start":
                started = message
            else:
                if started is not None and started["status"] >= 400 and started["status"] != CLIENT_GONE and not told:
                    told = True
                    self._on_error(
                        started["status"], scope["path"], _reason(started["status"], message.get("body", b""))
                    )
                ended = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None, "a coroutine is cancelled outside of any task"
            task.uncancel()
            error = unavailable("the server is stopping and could not wait for the end of this answer", "stopping")
            if started is None:
                await error_answer(error)(scope, receive, noted)
            elif not ended and _is_stream(started):
                self._on_error(error.status, scope["path"], str(error))
                with suppress(OSError):
                    event = b"data: " + msgspec.json.encode(error.body) + b"\n\n"
                    await send({"type": "http.response.body", "body": event, "more_body": False})
            elif not ended:
                raise


def _reason(status: int, body: bytes) -> str:
    """For a log: an error's message; of a 400, which repeats what the client sent, the code and the field instead."""
    try:
        error = msgspec.json.decode(body)["error"]
        if status != 400:
            return str(error["message"])
        return str(error["code"] or error["type"]) + (f" of {error['param']}" if error["param"] else "")
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""


def _is_stream(started: Message) -> bool:
    return any(name == b"content-type" and value.startswith(EVENTS) for name, value in started["headers"])
