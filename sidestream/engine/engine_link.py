"""The engine's process as its parent holds it: the process, and the socket between the two."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from asyncio import FIRST_COMPLETED
from asyncio import wait as first_of

import zmq
import zmq.asyncio

from sidestream import errors
from sidestream.engine.startup_clock import StartupClock
from sidestream.engine.wire import Died, Event, Phase, Ready, StartFailed, decode_event
from sidestream.errors import EngineDeadError, SidestreamError

LAST_WORD_SECONDS = 0.3
"""How long what an ended process had sent may take to arrive."""


class EngineLink:
    """Made by ``open``; ``end``, then ``close``. The socket lies in a folder that only this user can enter."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="sidestream-")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._address = f"ipc://{self._folder}/engine"
        self._socket.bind(self._address)
        self._process: asyncio.subprocess.Process | None = None

    @classmethod
    async def open(cls) -> EngineLink:
        """Start a process, which imports the engine and waits for its first command."""
        link = cls()
        try:
            link._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "sidestream.engine.start_engine_process", link._address),
                stdin=asyncio.subprocess.DEVNULL,
            )
        except BaseException:
            link.close()
            raise
        return link

    def send(self, message: bytes) -> None:
        """Queue an encoded command; never blocks, since there is no limit to what may be queued."""
        self._socket.send(message)

    async def receive(self) -> Event:
        return decode_event(await self._socket.recv())

    async def ended(self) -> int:
        """The process's exit code, when it has ended and what it sent has had time to arrive."""
        assert self._process is not None, "there is no process yet"
        await self._process.communicate()
        await asyncio.sleep(LAST_WORD_SECONDS)
        return int(self._process.returncode or 0)

    async def ready(self, clock: StartupClock) -> Ready:
        """Follow the start of the engine to its end.

        Raises:
            ConfigError, CheckpointError, CapacityError: it cannot start so.
            EngineDeadError: the process ended.
        """
        ended = asyncio.create_task(self.ended())
        message: asyncio.Task[Event] | None = None
        try:
            while True:
                message = asyncio.create_task(self.receive())
                await first_of({message, ended}, return_when=FIRST_COMPLETED)
                await first_of({message}, timeout=LAST_WORD_SECONDS if ended.done() else 0)
                if not message.done():
                    code = ended.result()
                    raise EngineDeadError(f"the engine's process ended at its start with exit code {code}")
                event = message.result()
                if isinstance(event, Phase) and event.name != clock.current:
                    clock.begin(event.name, total=event.total, at=event.at)
                elif isinstance(event, Phase):
                    clock.advance(event.done)
                elif isinstance(event, StartFailed):
                    raise error_of(event.kind, event.message)
                elif isinstance(event, Died):
                    raise EngineDeadError(f"the engine failed at its start: {event.message}")
                elif isinstance(event, Ready):
                    shutil.rmtree(self._folder, ignore_errors=True)  # connected: a killed parent leaves nothing behind
                    return event
        finally:
            tasks = [ended] if message is None else [ended, message]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def end(self, *, patience: float = 0.0) -> None:
        """Let the process end, or end it."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        try:
            if patience:
                await asyncio.wait_for(process.communicate(), patience)
        except TimeoutError:
            pass
        if process.returncode is None:
            process.kill()
            await process.communicate()

    def close(self) -> None:
        """Close the socket, once nobody receives from it any more."""
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


def error_of(kind: str, message: str) -> SidestreamError:
    """An error of the other process, as the class that it was there."""
    made: SidestreamError = getattr(errors, kind, SidestreamError)(message)
    return made
