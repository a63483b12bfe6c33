"""The application without a process behind it: a stand-in gives the tokens that a test scripts."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI

from sidestream.config.engine import EngineConfig
from sidestream.config.model import ModelConfig
from sidestream.core.request import FinishReason
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.async_engine import Delta
from sidestream.engine.input_processor import InputProcessor, ProcessedPrompt, Prompt
from sidestream.engine.llm import bundled_model
from sidestream.engine.output_processor import OutputProcessor
from sidestream.engine.tokenizer import load_tokenizer
from sidestream.engine.wire import EngineState
from sidestream.server.app import create_app
from sidestream.server.http_server import HttpServer
from sidestream.server.service import Service
from sidestream.server.settings import ServerSettings

MODEL = "glm5-next-tiny"
MAX_MODEL_LEN = 256
STOP_SECONDS = 60.0


class StandIn:
    """What an ``AsyncEngine`` is to the server.

    Attributes:
        script: makes the deltas of one call of ``stream``.
        open: calls of ``stream`` that have not ended.
    """

    def __init__(self, folder: Path, script: Callable[[Sequence[ProcessedPrompt]], AsyncGenerator[list[Delta], None]]):
        model = ModelConfig.from_hf(folder)
        self.tokenizer = load_tokenizer(folder)
        self.architecture = model.architecture
        self.dead: str | None = None
        ledger = {"parts": {"weights": {"measured": 3 * 2**20}}, "measured": 3 * 2**20, "budget": 2**23}
        self.ready = SimpleNamespace(
            max_model_len=MAX_MODEL_LEN, vocab_size=model.vocab_size, num_blocks=4, block_size=64, ledger=ledger
        )
        self.state = EngineState(free_blocks=4)
        self.script = script
        self.open = 0
        self._inputs = InputProcessor(model, self.tokenizer, max_model_len=MAX_MODEL_LEN, seed=0)
        self._outputs = OutputProcessor(self.tokenizer, model.eos_token_ids)

    async def process(self, prompts: Sequence[tuple[Prompt, SamplingParams]]) -> list[ProcessedPrompt]:
        return [self._inputs.process(str(i), *prompt) for i, prompt in enumerate(prompts)]

    async def tokenizing(self, work: Callable[[], Any]) -> Any:
        return work()

    async def died(self) -> str:
        never: asyncio.Future[str] = asyncio.Future()
        return await never

    async def stop(self) -> None:
        return None

    async def stream(self, batch: Sequence[ProcessedPrompt]) -> AsyncGenerator[list[Delta], None]:
        self.open += 1
        try:
            async for deltas in self.script(batch):
                yield deltas
        finally:
            self.open -= 1

    def delta(self, prompt: ProcessedPrompt, text: str, reason: FinishReason | None = None) -> Delta:
        """A token of a prompt's only completion."""
        return Delta(0, 0, text, 5, None, reason, None, self._outputs.add(prompt))


async def nothing(batch: Sequence[ProcessedPrompt]) -> AsyncGenerator[list[Delta], None]:
    """Tokens that never come."""
    await asyncio.Event().wait()
    yield []


def make(**settings: Any) -> tuple[FastAPI, Service, StandIn]:
    """An application that serves, with a stand-in whose tokens never come."""
    folder = bundled_model()
    service = Service(ServerSettings(folder=folder, model_name=MODEL, engine=EngineConfig(), **settings))

    engine: Any = StandIn(folder, nothing)

    async def start() -> Any:
        return engine

    app = create_app(service, engine=start, end=lambda: None)
    service.serve(engine)
    return app, service, engine


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The application on a free port of this machine, in a thread; its address."""
    with running(app, drain_seconds=1) as (address, _):
        yield address


@contextmanager
def running(app: FastAPI, *, drain_seconds: int | None) -> Iterator[tuple[str, HttpServer]]:
    """As ``served``, with the server itself."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = HttpServer(app, drain_seconds=drain_seconds)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}", server
        finally:
            server.stop()
            thread.join(STOP_SECONDS)
            assert not thread.is_alive(), f"the server has not ended after {STOP_SECONDS} s"


def call(app: FastAPI, method: str, path: str, **request: Any) -> httpx.Response:
    """One whole exchange."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, **request)

    return asyncio.run(run())


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of an answer, which must have this status."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = json.loads(answer.content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
