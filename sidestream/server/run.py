"""Runs a server in this process until it is told to stop, or until its engine is gone."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable

import uvicorn

from sidestream.engine.async_engine import AsyncEngine
from sidestream.engine.wire import Phase
from sidestream.errors import ConfigError
from sidestream.server.app import create_app
from sidestream.server.service import Service
from sidestream.server.settings import ServerSettings

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that they close them and none is closed under a new request."""


def run_server(
    settings: ServerSettings,
    *,
    on_listening: Callable[[str], None],
    on_phase: Callable[[Phase], None],
    on_ready: Callable[[float], None],
) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests end; a second SIGINT does not wait.

    Args:
        on_listening: told the address once it is bound; until the engine is there requests get 503.
        on_phase: told how far the engine's start is.
        on_ready: told the seconds from the call to the first request that can be served.
    Raises:
        ConfigError, CheckpointError, CapacityError: the engine cannot start so.
        EngineDeadError: its process ended.
    """
    began = time.monotonic()
    bound = _bind(settings)
    service = Service(settings)

    async def engine() -> AsyncEngine:
        def note(phase: Phase) -> None:
            service.phase = phase
            on_phase(phase)

        made = await AsyncEngine.start(settings.folder, settings.engine, on_phase=note)
        on_ready(time.monotonic() - began)
        return made

    def end() -> None:
        server.should_exit = True

    config = uvicorn.Config(
        create_app(service, engine=engine, end=end),
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        server_header=False,
        timeout_graceful_shutdown=settings.drain_seconds,
    )
    server = uvicorn.Server(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _already_obeyed)  # uvicorn sends a signal again once it has obeyed it
    on_listening(_address(bound))
    asyncio.run(server.serve(sockets=[bound]))
    if service.failure is not None:
        raise service.failure


def _bind(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {settings.host} port {settings.port}: {error}") from error


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _already_obeyed(number: int, frame: object) -> None:
    return None
