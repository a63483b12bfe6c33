"""``AsyncEngine`` beside a process that a test plays: who leaves is forgotten, and the process is told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sidestream.config.model import ModelConfig
from sidestream.core.outputs import EngineOutput
from sidestream.core.request import FinishReason
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.async_engine import AsyncEngine
from sidestream.engine.bundled import bundled_model
from sidestream.engine.input_processor import ProcessedPrompt
from sidestream.engine.tokenizer import load_tokenizer
from sidestream.engine.wire import Abort, Add, Command, EngineState, Event, StepDone, decode_command
from sidestream.errors import RequestError
from tests.engine.interrupts import InterruptAt


class Link:
    """Keeps what was sent; what is to be received is put in by hand."""

    def __init__(self) -> None:
        self.sent: list[Command] = []
        self.events: asyncio.Queue[Event] = asyncio.Queue()

    def send(self, message: bytes) -> None:
        self.sent.append(decode_command(message))

    async def receive(self) -> Event:
        return await self.events.get()

    async def ended(self) -> int:
        return await asyncio.Future()

    async def end(self, patience: float = 0.0) -> None:
        return None

    def close(self) -> None:
        return None

    @property
    def aborted(self) -> set[str]:
        return {name for command in self.sent if isinstance(command, Abort) for name in command.request_ids}


def make_engine(link: Any) -> AsyncEngine:
    folder = bundled_model()
    ready: Any = SimpleNamespace(max_model_len=256, state=EngineState())
    return AsyncEngine(link, ready, model=ModelConfig.from_hf(folder), tokenizer=load_tokenizer(folder), seed=0)


async def opened(engine: AsyncEngine, link: Link) -> tuple[list[ProcessedPrompt], Any]:
    """Two prompts, three requests, of which the first has got a token."""
    params = SamplingParams(max_tokens=9)
    batch = await engine.process([([5, 6, 7], params), ([8, 9], SamplingParams(max_tokens=9, n=2))])
    stream = engine.stream(batch)
    link.events.put_nowait(StepDone([], None))
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    link.events.put_nowait(StepDone([token_of(batch, 0)], None))
    assert len(await first) == 1
    return batch, stream


def token_of(batch: list[ProcessedPrompt], prompt: int, reason: FinishReason | None = None) -> EngineOutput:
    return EngineOutput(batch[prompt].requests[0].request_id, 11, reason)


def test_whoever_leaves_is_forgotten_wherever_an_interrupt_comes() -> None:
    async def run() -> int:
        number = 0
        while True:
            link = Link()
            engine = make_engine(link)
            batch, stream = await opened(engine, link)
            names = {request.request_id for prompt in batch for request in prompt.requests}
            (added,) = [command for command in link.sent if isinstance(command, Add)]
            assert {request.request_id for request in added.requests} == names
            with InterruptAt(number, ("/engine/async_engine.py", "/engine/output_processor.py")) as interrupt:
                try:
                    engine._drop(batch, sorted(names))
                except KeyboardInterrupt:
                    assert interrupt.reached
            outputs = [EngineOutput(name, 11, None) for name in sorted(names)]
            await stream.aclose()
            link.events.put_nowait(StepDone(outputs, None))
            while not link.events.empty():
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert link.aborted == names, number
            assert engine.num_open == 0
            assert not engine._outputs._prompts
            assert not engine._outputs._by_request
            await engine.stop()
            if not interrupt.reached:
                return number
            number += 1

    assert asyncio.run(run()) > 10


def test_a_token_that_ends_a_request_of_nobody_is_no_reason_to_abort_it() -> None:
    async def run() -> None:
        link = Link()
        engine = make_engine(link)
        batch, stream = await opened(engine, link)
        await stream.aclose()
        del link.sent[:]
        link.events.put_nowait(StepDone([token_of(batch, 0, FinishReason.LENGTH)], None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not link.aborted
        await engine.stop()

    asyncio.run(run())


def test_a_prompt_that_could_not_be_followed_leaves_the_others_unfollowed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error that comes out is its own, and nothing was sent."""

    async def run() -> None:
        link = Link()
        engine = make_engine(link)
        batch = await engine.process([([5, 6, 7], SamplingParams()), ([8, 9], SamplingParams())])
        add, calls = engine._outputs.add, []

        def fail(prompt: ProcessedPrompt) -> Any:
            calls.append(prompt)
            if len(calls) == 2:
                raise RequestError("the second")
            return add(prompt)

        monkeypatch.setattr(engine._outputs, "add", fail)
        with pytest.raises(RequestError, match="the second"):
            await anext(engine.stream(batch))
        assert engine.num_open == 0
        assert not engine._outputs._prompts
        assert not [command for command in link.sent if isinstance(command, Add)]
        await engine.stop()

    asyncio.run(run())
