"""``/v1/completions``: prompts of text or token ids in, text out."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sidestream.core.outputs import CompletionOutput, RequestOutput
from sidestream.core.request import FinishReason
from sidestream.engine.async_engine import Delta
from sidestream.engine.input_processor import ProcessedPrompt, Prompt
from sidestream.errors import RequestError
from sidestream.server.errors import JSONAnswer
from sidestream.server.event_stream import event_stream, unless_gone
from sidestream.server.logprobs import LogprobColumns
from sidestream.server.protocol import CompletionRequest
from sidestream.server.service import Service, sampling_params, usage

DEFAULT_MAX_TOKENS = 16


async def create_completion(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Answer one request, whole or streamed."""
    engine = service.engine
    service.check_model(body.model)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(f"best_of is {body.best_of} and n is {body.n or 1}; only equal numbers are supported")
    prompts = _prompts(body)
    service.check_sequences(len(prompts), body.n)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    score_only = bool(body.echo) and max_tokens == 0
    params = sampling_params(
        body,
        max_tokens=1 if score_only else max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    batch = await engine.process([(_salted(prompt, body.cache_salt), params) for prompt in prompts])
    answer = _Answer(service, body, batch, score_only=score_only)
    if body.stream:
        return await event_stream(request.receive, answer.events(), on_gone=service.metrics.disconnected)
    return JSONAnswer(await unless_gone(request.receive, answer.whole()))


def _prompts(body: CompletionRequest) -> list[Prompt]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is an empty list")
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _salted(prompt: Prompt, salt: str | None) -> Prompt:
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, "cache_salt": salt}


@dataclass(frozen=True, slots=True)
class _Part:
    """New text of one choice, with the columns of its new tokens."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None

    def as_choice(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "text": self.text,
            "logprobs": self.logprobs,
            "finish_reason": None if self.finish_reason is None else str(self.finish_reason),
            "stop_reason": self.stop_reason,
        }


class _Answer:
    """One request's answer in the making.

    Args:
        score_only: ``echo`` with ``max_tokens`` 0: a token is generated, since the engine cannot do less, and dropped.
    """

    def __init__(
        self, service: Service, body: CompletionRequest, batch: Sequence[ProcessedPrompt], *, score_only: bool
    ) -> None:
        self._service = service
        self._body = body
        self._batch = batch
        self._score_only = score_only
        self._n = body.n or 1
        self._columns: dict[int, LogprobColumns] = {}
        self._head: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.settings.model_name,
        }

    async def whole(self) -> dict[str, Any]:
        outputs: dict[int, RequestOutput] = {}
        async with aclosing(self._service.run(self._head["id"], self._batch, score_only=self._score_only)) as arrivals:
            async for deltas in arrivals:
                outputs |= {delta.prompt_index: delta.output for delta in deltas}
        parts = [
            self._whole_part(prompt, outputs[prompt], completion)
            for prompt in sorted(outputs)
            for completion in outputs[prompt].outputs
        ]
        generated = sum(len(c.token_ids) for output in outputs.values() for c in output.outputs)
        choices = [part.as_choice() for part in parts]
        return self._head | {"choices": choices, "usage": self._usage(generated, outputs)}

    async def events(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        options, generated = self._body.stream_options, 0
        every = options is not None and bool(options.continuous_usage_stats)
        outputs: dict[int, RequestOutput] = {}
        async with aclosing(self._service.run(self._head["id"], self._batch, score_only=self._score_only)) as arrivals:
            async for deltas in arrivals:
                chunks = []
                for delta in deltas:
                    generated += 1
                    outputs[delta.prompt_index] = delta.output
                    part = self._part(delta)
                    if part.text or part.finish_reason is not None or part.logprobs is not None or every:
                        counts = {"usage": self._usage(generated, outputs)} if every else {}
                        chunks.append(self._head | {"choices": [part.as_choice()]} | counts)
                if chunks:
                    yield chunks
        if options is not None and options.include_usage:
            yield [self._head | {"choices": [], "usage": self._usage(generated, outputs)}]

    def _part(self, delta: Delta) -> _Part:
        """A streamed part; the first of a choice begins with the prompt if that is to be echoed."""
        index = delta.prompt_index * self._n + delta.completion_index
        first = index not in self._columns
        columns = self._columns.setdefault(index, self._new_columns())
        text = ""
        if first and self._body.echo:
            text = self._echo(delta.output, columns)
        if not self._score_only:
            text += delta.text
            if delta.logprobs is not None:
                columns.add(delta.token_id, delta.logprobs)
        return _Part(index, text, self._taken(columns), self._reason(delta.finish_reason), delta.stop_reason)

    def _whole_part(self, prompt: int, output: RequestOutput, completion: CompletionOutput) -> _Part:
        columns = self._new_columns()
        text = self._echo(output, columns) if self._body.echo else ""
        if not self._score_only:
            text += completion.text
            for token, row in zip(completion.token_ids, completion.logprobs or (), strict=False):
                columns.add(token, row)
        return _Part(
            prompt * self._n + completion.index,
            text,
            self._taken(columns),
            self._reason(completion.finish_reason),
            completion.stop_reason,
        )

    def _new_columns(self) -> LogprobColumns:
        return LogprobColumns(self._service.tokens, self._body.logprobs or 0)

    def _taken(self, columns: LogprobColumns) -> dict[str, Any] | None:
        return columns.take() if self._body.logprobs is not None else None

    def _reason(self, reason: FinishReason | None) -> FinishReason | None:
        return FinishReason.LENGTH if self._score_only and reason is not None else reason

    def _echo(self, output: RequestOutput, columns: LogprobColumns) -> str:
        """The prompt's text; its tokens go to the columns."""
        for token, row in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False):
            columns.add(token, row)
        if output.prompt is not None:
            return output.prompt
        tokenizer = self._service.engine.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(output.prompt_token_ids))

    def _usage(self, generated: int, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self._batch)
        cached = sum(output.cached_tokens for output in outputs.values())
        return usage(prompt_tokens, 0 if self._score_only else generated, cached=cached)
