"""The HTTP server itself: uvicorn in front of the application. Imported while the engine's process starts."""

from __future__ import annotations

import socket
from asyncio import wait as all_of
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from sidestream.server.connection import Connection

LAST_WORDS_SECONDS = 1.0
"""How long a client may take to read that its answer was cut off."""
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that they close them and none is closed under a new request."""


class HttpServer(uvicorn.Server):
    """Serves until ``stop``; then lets running requests end. Signals are left to the caller.

    Args:
        drain_seconds: that running requests may take; None waits for all.
    """

    def __init__(self, app: FastAPI, *, drain_seconds: int | None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                log_level="warning",
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                server_header=False,
                timeout_graceful_shutdown=drain_seconds,
            )
        )

    @property
    def num_answering(self) -> int:
        """Requests that are being answered."""
        return len(self.server_state.tasks)

    def stop(self, *, at_once: bool = False) -> None:
        """Accept nothing more; ``at_once`` does not wait for running requests."""
        self.should_exit = True
        self.force_exit = self.force_exit or at_once

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; then whoever's answer was cut off is told so, or is hung up on if it does not read."""
        await super().shutdown(sockets)
        if self.force_exit:
            for task in self.server_state.tasks:
                task.cancel()
        await self._answered()
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self._answered()

    async def _answered(self) -> None:
        if tasks := set(self.server_state.tasks):
            await all_of(tasks, timeout=LAST_WORDS_SECONDS)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
