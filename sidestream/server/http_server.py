"""The HTTP server itself: uvicorn in front of the application. Imported while the engine's process starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from sidestream.server.connection import Connection

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

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
