"""Runs a server in this process until it is told to stop, or until its engine is gone."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from asyncio import FIRST_COMPLETED
from asyncio import wait as first_of
from typing import TYPE_CHECKING, Any, Protocol

from sidestream.engine.async_engine import AsyncEngine
from sidestream.engine.engine_link import EngineLink
from sidestream.engine.startup_clock import (
    CONFIG,
    ENGINE_IMPORTS,
    ENGINE_PROCESS,
    SERVER_IMPORTS,
    PhaseProgress,
    StartupClock,
)
from sidestream.errors import ConfigError
from sidestream.server.settings import ServerSettings

if TYPE_CHECKING:
    from sidestream.server.http_server import HttpServer
    from sidestream.server.service import Service

BACKLOG = 2048
UNCHECKED = (SERVER_IMPORTS, ENGINE_PROCESS, ENGINE_IMPORTS, CONFIG)
"""Phases before settings and checkpoint have passed."""


class Watcher(Protocol):
    """Told how a server lives."""

    def phase(self, progress: PhaseProgress) -> None:
        """A phase of the start begins, or goes on."""
        ...

    def listening(self, address: str) -> None:
        """Settings and checkpoint are good; until the engine is there, requests get 503."""
        ...

    def ready(self, seconds: float) -> None:
        """Requests are served, so many seconds after the process began."""
        ...

    def load(self, line: str) -> None:
        """What ran in the last seconds."""
        ...

    def refused(self, status: int, path: str, message: str) -> None:
        """A request was answered with an error."""
        ...

    def answered(self, line: str) -> None:
        """A request is over: its line of the access log."""
        ...

    def stopping(self, signal_name: str, *, requests: int, limit: int | None) -> None:
        """A signal came; requests that are being answered may go on for ``limit`` seconds, None is to their end."""
        ...

    def stopped(self, seconds: float, *, unfinished: int) -> None:
        """All is over, so many seconds after the signal."""
        ...


def run_server(settings: ServerSettings, watcher: Watcher) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests end; a second SIGINT does not wait.

    Raises:
        ConfigError, CheckpointError, CapacityError: the engine cannot start so.
        EngineDeadError: its process ended.
    """

    async def serve() -> None:
        await _Running(settings, watcher).run()

    asyncio.run(serve())


class _Running:
    """One server from its start to its end."""

    def __init__(self, settings: ServerSettings, watcher: Watcher) -> None:
        self._settings = settings
        self._watcher = watcher
        self._service: Service | None = None
        self._server: HttpServer | None = None
        self._loop = asyncio.get_running_loop()
        self._checked: asyncio.Future[None] = self._loop.create_future()
        self._stop: asyncio.Future[None] = self._loop.create_future()
        self._stopping_since = 0.0
        self._unfinished = 0
        self._clock = StartupClock(SERVER_IMPORTS, tell=self._progress)

    async def run(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._signal, number)
        with _bind(self._settings) as bound:
            self._clock.begin(ENGINE_PROCESS)
            link = await EngineLink.open()
            try:
                await self._serve(bound, link)
            finally:
                await link.end()
                link.close()
        if self._stop.done():
            self._watcher.stopped(time.monotonic() - self._stopping_since, unfinished=self._unfinished)
        if self._service is not None and self._service.failure is not None:
            raise self._service.failure

    async def _serve(self, bound: socket.socket, link: EngineLink) -> None:
        from sidestream.server.app import create_app  # while the engine's process imports what it needs
        from sidestream.server.http_server import HttpServer
        from sidestream.server.load_log import LoadLog
        from sidestream.server.service import Service

        self._service = service = Service(self._settings)
        service.on_refused = self._watcher.refused
        service.on_answered = self._watcher.answered
        starting = asyncio.create_task(
            AsyncEngine.start(self._settings.folder, self._settings.engine, clock=self._clock, link=link)
        )
        if not await self._passes(starting):
            return
        _listen(bound)
        self._watcher.listening(_address(bound))

        async def engine() -> AsyncEngine:
            made = await starting
            self._watcher.ready(self._clock.end())
            return made

        app = create_app(service, engine=engine, end=lambda: self._server.stop() if self._server else None)
        self._server = HttpServer(app, drain_seconds=self._settings.drain_seconds)
        log = asyncio.create_task(LoadLog(service, self._watcher.load).run())
        try:
            await self._server.serve(sockets=[bound])
        finally:
            log.cancel()
            await asyncio.gather(log, return_exceptions=True)

    async def _passes(self, starting: asyncio.Task[AsyncEngine]) -> bool:
        """Whether settings and checkpoint are good; False if a signal came first. Raises what ``starting`` does."""
        awaited: list[asyncio.Future[Any]] = [starting, self._checked, self._stop]
        await first_of(awaited, return_when=FIRST_COMPLETED)
        if self._stop.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return False
        if starting.done():
            starting.result()
        return True

    def _progress(self, progress: PhaseProgress) -> None:
        if progress.name not in UNCHECKED and not self._checked.done():
            self._checked.set_result(None)
        if self._service is not None:
            self._service.phase = progress
        if not self._stop.done():
            self._watcher.phase(progress)

    def _signal(self, number: signal.Signals) -> None:
        if self._stop.done():
            if number is signal.SIGINT and self._server is not None:
                self._server.stop(at_once=True)
            return
        self._stop.set_result(None)
        self._stopping_since = time.monotonic()
        answering = self._answering()
        limit = self._settings.drain_seconds
        self._watcher.stopping(number.name, requests=answering, limit=limit)
        if limit is not None:
            self._loop.call_later(limit, self._cut)
        if self._server is not None:
            self._server.stop()

    def _cut(self) -> None:
        self._unfinished = self._answering()

    def _answering(self) -> int:
        return 0 if self._server is None else self._server.num_answering


def _bind(settings: ServerSettings) -> socket.socket:
    """A socket that has the port; nobody can connect before ``_listen``."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((settings.host, settings.port))
    except OSError as error:
        bound.close()
        where = f"{settings.host} port {settings.port}"
        knob = "give another --host or --port (0 takes a free port)"
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}; {knob}") from error
    return bound


def _listen(bound: socket.socket) -> None:
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise ConfigError(f"cannot listen on {host} port {port}: {error}") from error


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
