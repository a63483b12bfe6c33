"""``AsyncEngine``: the engine in a process of its own, as an event loop sees it."""

from __future__ import annotations

import asyncio
import itertools
from asyncio import FIRST_COMPLETED
from asyncio import wait as first_of
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from sidestream.config.engine import EngineConfig
from sidestream.config.model import ModelConfig
from sidestream.core.outputs import EngineOutput, Logprob, RequestOutput
from sidestream.core.request import FinishReason
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.engine_link import EngineLink, error_of
from sidestream.engine.input_processor import InputProcessor, ProcessedPrompt, Prompt
from sidestream.engine.output_processor import OutputProcessor
from sidestream.engine.startup_clock import ENGINE_PROCESS, StartupClock
from sidestream.engine.tokenizer import load_tokenizer
from sidestream.engine.wire import (
    Abort,
    Add,
    Died,
    Event,
    Ready,
    Refused,
    Shutdown,
    Start,
    StepDone,
    encode,
)
from sidestream.errors import EngineDeadError, RequestError, SidestreamError

T = TypeVar("T")

STOP_SECONDS = 10.0
"""How long the process may take to end by itself."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token added to one completion.

    Attributes:
        text: that can be shown now; "" while a character or a stop string may be unfinished.
        logprobs: of this token; None if not asked for.
        queue_seconds, cached_tokens: of the first token: how long its request waited for its first step, and how much
            of its prompt came from a cache.
        output: its prompt's whole output, live.
    """

    prompt_index: int
    completion_index: int
    text: str
    token_id: int
    logprobs: dict[int, Logprob] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    output: RequestOutput
    queue_seconds: float = 0.0
    cached_tokens: int = 0


Inbox: TypeAlias = "asyncio.Queue[Delta | SidestreamError]"


@dataclass(slots=True)
class _Place:
    """Where the tokens of one engine request go, and how much of its text went there."""

    inbox: Inbox
    prompt_index: int
    completion_index: int
    output: RequestOutput
    shown: int = 0


class AsyncEngine:
    """A running engine process. Made by ``start``; all methods belong to that event loop.

    Attributes:
        ready: what the process said when it was ready.
        state: its last report.
        tokenizer: of the checkpoint; None if it has none. Only for work handed to ``tokenizing``.
        architecture: the checkpoint's ``model_type``.
    """

    def __init__(
        self,
        link: EngineLink,
        ready: Ready,
        *,
        model: ModelConfig,
        tokenizer: Any | None,
        seed: int,
    ) -> None:
        self.ready = ready
        self.state = ready.state
        self.tokenizer = tokenizer
        self.architecture: str = model.architecture
        self._link = link
        self._inputs = InputProcessor(model, self.tokenizer, max_model_len=ready.max_model_len, seed=seed)
        self._outputs = OutputProcessor(self.tokenizer, model.eos_token_ids)
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        self._ids = itertools.count()
        self._places: dict[str, _Place] = {}
        self._dead: str | None = None
        self._tasks = (asyncio.create_task(self._receive()), asyncio.create_task(self._watch()))

    @classmethod
    async def start(
        cls, folder: Path, config: EngineConfig, *, clock: StartupClock | None = None, link: EngineLink | None = None
    ) -> AsyncEngine:
        """Start the process and return when it has served a request of its own through every captured shape.

        Args:
            clock: gets the phases of both processes; whoever made it ends it.
            link: to a process that was started already; from now on it is this engine's.
        Raises:
            ConfigError, CheckpointError, CapacityError: as ``LLM`` does.
            EngineDeadError: the process ended.
        """
        clock = clock if clock is not None else StartupClock()
        if link is None:
            clock.begin(ENGINE_PROCESS)
            link = await EngineLink.open()
        tasks: list[asyncio.Task[Any]] = []
        try:
            link.send(encode(Start(str(folder), config)))
            starting = asyncio.create_task(link.ready(clock))
            loading = asyncio.create_task(asyncio.to_thread(_read_model, folder))
            tasks = [starting, loading]
            await first_of(tasks, return_when=FIRST_COMPLETED)
            if not loading.done():
                starting.result()
                clock.begin("server's tokenizer")
            model, tokenizer = await loading
            return cls(link, await starting, model=model, tokenizer=tokenizer, seed=config.seed)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await link.end()
            link.close()
            raise

    @property
    def dead(self) -> str | None:
        """Why the engine serves no more; None while it does."""
        return self._dead

    @property
    def num_open(self) -> int:
        """Engine requests that somebody waits for."""
        return len(self._places)

    async def died(self) -> str:
        """Return when the process has ended, saying why."""
        await asyncio.shield(self._tasks[1])
        assert self._dead is not None, "the process is watched until it ends"
        return self._dead

    async def process(self, prompts: Sequence[tuple[Prompt, SamplingParams]]) -> list[ProcessedPrompt]:
        """Check and tokenise prompts, away from the event loop.

        Raises:
            RequestError: naming what is wrong; of several prompts, which one.
        """

        def work() -> list[ProcessedPrompt]:
            batch = []
            for index, (prompt, params) in enumerate(prompts):
                try:
                    batch.append(self._inputs.process(str(next(self._ids)), prompt, params))
                except RequestError as error:
                    message = f"prompt {index}: {error}" if len(prompts) > 1 else str(error)
                    raise RequestError(message, param=error.param, code=error.code) from None
            return batch

        return await self.tokenizing(work)

    async def tokenizing(self, work: Callable[[], T]) -> T:
        """The result of work that uses the tokenizer, on the one thread that does: it is not safe on several."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)

    async def stream(self, prompts: Sequence[ProcessedPrompt]) -> AsyncGenerator[list[Delta], None]:
        """Run prompts; one delta a token, all that have come since the last time. Closing aborts what is left.

        So whoever takes long to pass something on gets more at once, and costs less.

        Raises:
            CapacityError, RequestError: the engine can never run one of them; the others are aborted.
            EngineDeadError: the process ended first.
        """
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        try:
            message = encode(Add(tuple(request for prompt in prompts for request in prompt.requests)))
        except (OverflowError, UnicodeEncodeError) as error:
            raise RequestError(f"the request holds what cannot be sent to the engine: {error}") from None
        inbox: Inbox = asyncio.Queue()
        names: list[str] = []
        try:
            for index, prompt in enumerate(prompts):
                output = self._outputs.add(prompt)
                for completion, request in enumerate(prompt.requests):
                    names.append(request.request_id)
                    self._places[request.request_id] = _Place(inbox, index, completion, output)
            self._link.send(message)
            left = len(names)
            while left:
                deltas: list[Delta] = []
                item = await inbox.get()
                while True:
                    if isinstance(item, SidestreamError):
                        raise item
                    left -= item.finish_reason is not None
                    deltas.append(item)
                    if inbox.empty():
                        break
                    item = inbox.get_nowait()
                yield deltas
        finally:
            self._drop(prompts, names)

    def _drop(self, prompts: Sequence[ProcessedPrompt], names: Sequence[str]) -> None:
        """Forget prompts; what is unfinished of them is aborted, at the latest when its next token comes."""
        for name in names:
            self._places.pop(name, None)
        aborted = [name for prompt in prompts for name in self._outputs.abort(prompt.request_id)]
        for prompt in prompts:
            self._outputs.forget(prompt.request_id)
        if aborted and self._dead is None:
            self._link.send(encode(Abort(tuple(aborted))))

    async def stop(self) -> None:
        """End the process; open requests fail with ``EngineDeadError``."""
        if self._dead is None:
            self._die("the engine was stopped")
            self._link.send(encode(Shutdown()))
        await self._link.end(patience=STOP_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tokenizing.shutdown(wait=False)
        self._link.close()

    async def _receive(self) -> None:
        try:
            while True:
                self._take(await self._link.receive())
        except Exception as error:
            self._die(f"a message of the engine could not be handled: {error}")
            raise

    def _take(self, event: Event) -> None:
        if isinstance(event, StepDone):
            if event.state is not None:
                self.state = event.state
            stopped = [output.request_id for output in event.outputs if self._deliver(output)]
            if stopped:
                self._link.send(encode(Abort(tuple(stopped))))
        elif isinstance(event, Refused):
            if (place := self._places.get(event.request_id)) is not None:
                place.inbox.put_nowait(error_of(event.kind, event.message))
        elif isinstance(event, Died):
            self._die(f"a step of the engine failed: {event.message}")

    def _deliver(self, output: EngineOutput) -> bool:
        """Hand one token to whom it belongs; whether its request must be aborted: a stop string ended it, or nobody
        waits for it, and whoever left was interrupted before it could say so."""
        place = self._places.get(output.request_id)
        if place is None or not self._outputs.follows(output.request_id):
            return output.finish_reason is None
        stopped = self._outputs.push(output)
        if output.token_id is None:
            return False
        made = place.output.outputs[place.completion_index]
        place.inbox.put_nowait(
            Delta(
                prompt_index=place.prompt_index,
                completion_index=place.completion_index,
                text=made.text[place.shown :],
                token_id=output.token_id,
                logprobs=made.logprobs[-1] if made.logprobs else None,
                finish_reason=made.finish_reason,
                stop_reason=made.stop_reason,
                output=place.output,
                queue_seconds=output.queue_seconds,
                cached_tokens=output.cached_tokens,
            )
        )
        place.shown = len(made.text)
        if made.finished:
            del self._places[output.request_id]
        return stopped

    async def _watch(self) -> None:
        """Learn of the process's end."""
        code = await self._link.ended()
        self._die(f"the engine's process ended with exit code {code}")

    def _die(self, reason: str) -> None:
        """Fail everybody who waits; the first reason stays."""
        if self._dead is None:
            self._dead = reason
        for inbox in {id(place.inbox): place.inbox for place in self._places.values()}.values():
            inbox.put_nowait(EngineDeadError(self._dead))
        self._places.clear()


def _read_model(folder: Path) -> tuple[ModelConfig, Any | None]:
    return ModelConfig.from_hf(folder), load_tokenizer(folder)
