"""What all routes share: the engine at its present stage, the model's name, limits, metrics."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from sidestream.core.sampling_params import SamplingParams
from sidestream.core.structured_outputs import StructuredOutputs
from sidestream.engine.async_engine import AsyncEngine, Delta
from sidestream.engine.input_processor import ProcessedPrompt
from sidestream.engine.startup_clock import PhaseProgress
from sidestream.engine.wire import EngineState, Ready
from sidestream.errors import RequestError
from sidestream.server.access_log import current_exchange
from sidestream.server.errors import ApiError, shown, unavailable
from sidestream.server.json_body import check_json
from sidestream.server.metrics import Metrics, RequestClock
from sidestream.server.parsers import parser_of
from sidestream.server.protocol import ResponseFormat, SamplingFields
from sidestream.server.settings import ServerSettings
from sidestream.server.token_text import TokenText

TAKEN_AS_THEY_ARE = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
)
"""Fields that ``SamplingParams`` has by the same name, with the same default."""


class Service:
    """One server's state.

    Attributes:
        phase: how far the start is, before the engine is there.
        failure: why the server must end; None while all is well.
        on_refused: told status, path and reason of what is answered with an error once the engine was ready.
        on_answered: told the access log's lines.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.metrics = Metrics(settings.model_name)
        self.metrics.follow(self.report)
        self.phase: PhaseProgress | None = None
        self.failure: Exception | None = None
        self.on_refused: Callable[[int, str, str], None] | None = None
        self.on_answered: Callable[[str], None] | None = None
        self._engine: AsyncEngine | None = None
        self._tokens: TokenText | None = None

    def serve(self, engine: AsyncEngine) -> None:
        """Take requests from now on."""
        if engine.tokenizer is not None:  # which warns of lengths that the engine checks, with its own limit
            engine.tokenizer.model_max_length = sys.maxsize
        self._tokens = TokenText(engine.tokenizer)
        self._engine = engine

    def refused(self, status: int, path: str, reason: str) -> None:
        """A request was answered with an error; probes of a start are counted alone."""
        self.metrics.refused(status)
        if self._engine is not None and self.on_refused is not None:
            self.on_refused(status, path, reason)

    def answered(self, line: str) -> None:
        """A request is over, says the access log."""
        if self.on_answered is not None:
            self.on_answered(line)

    @property
    def alive(self) -> bool:
        """Nothing has failed: the engine runs, or is still starting."""
        return self._engine is None or self._engine.dead is None

    @property
    def ready(self) -> bool:
        """Requests are served now."""
        return self._engine is not None and self._engine.dead is None

    @property
    def engine(self) -> AsyncEngine:
        """The engine, serving.

        Raises:
            ApiError: 503, it is not ready yet, or dead.
        """
        if self._engine is None:
            phase = self.phase
            where = "" if phase is None else f": {phase.name}, {phase.done} of {phase.total}"
            raise unavailable(f"the engine is starting{where}", "starting")
        if self._engine.dead is not None:
            raise unavailable(self._engine.dead, "engine_dead")
        return self._engine

    @property
    def answer_parser(self) -> str:
        """Which parser takes chat answers apart: the settings', or the checkpoint's."""
        asked, engine = self.settings.answer_parser, self.engine
        template = getattr(engine.tokenizer, "chat_template", None)
        return parser_of(engine.architecture, template) if asked == "auto" else asked

    @property
    def tokens(self) -> TokenText:
        assert self._tokens is not None, "there is no engine yet"
        return self._tokens

    def check_model(self, name: str | None) -> None:
        """ApiError 404 if the request is meant for another model."""
        if name is not None and name != self.settings.model_name:
            message = f"the model {shown(name)} is not served here; this is {self.settings.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_sequences(self, prompts: int, n: int | None) -> None:
        """RequestError if one request would start too many sequences."""
        count, limit = prompts * (n or 1), self.settings.max_sequences
        if count > limit:
            raise RequestError(
                f"n is {n or 1} for {prompts} prompts, which are {count} sequences; the limit is {limit} "
                f"(max_sequences)"
            )

    async def run(
        self, name: str, batch: Sequence[ProcessedPrompt], *, score_only: bool = False
    ) -> AsyncGenerator[list[Delta], None]:
        """Run the prompts of the answer with this id, observed; closing it aborts them.

        Args:
            score_only: what is generated goes to nobody, and is not counted.
        """
        exchange = current_exchange()
        if exchange is not None:
            exchange.runs(name, batch, score_only=score_only)
        clocks = {
            (index, completion): RequestClock(self.metrics, prompt, completion, score_only=score_only)
            for index, prompt in enumerate(batch)
            for completion in range(len(prompt.requests))
        }
        try:
            async with aclosing(self.engine.stream(batch)) as arrivals:
                async for deltas in arrivals:
                    for delta in deltas:
                        place = (delta.prompt_index, delta.completion_index)
                        clocks[place].token(delta)
                        if exchange is not None:
                            exchange.token(delta)
                        if delta.finish_reason is not None:
                            del clocks[place]
                    yield deltas
        except RequestError:  # refused by the engine, so never begun
            clocks.clear()
            raise
        finally:
            for clock in clocks.values():
                clock.dropped()

    def report(self) -> tuple[Ready, EngineState] | None:
        """What the engine said last; None before it is there."""
        return None if self._engine is None else (self._engine.ready, self._engine.state)


def sampling_params(
    body: SamplingFields, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
) -> SamplingParams:
    """A body's fields as the engine's parameters.

    Raises:
        RequestError: naming the field, its value and the allowed range.
    """
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is given, which needs stream to be true")
    given: dict[str, Any] = {name: getattr(body, name) for name in TAKEN_AS_THEY_ARE if getattr(body, name) is not None}
    if body.logit_bias is not None:
        given["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=_structured(body),
        **given,
    )


def _structured(body: SamplingFields) -> StructuredOutputs | None:
    """The form that the text must have, whichever of the two fields says it."""
    form, asked = body.structured_outputs, body.response_format
    if form is not None and asked is not None:
        raise RequestError("structured_outputs and response_format are given; give one of them")
    if form is not None:
        if isinstance(form.json_, str):
            check_json(form.json_, "structured_outputs.json")
        return StructuredOutputs(**form.model_dump(exclude_none=True, by_alias=True))
    return None if asked is None else _of_format(asked)


def _of_format(asked: ResponseFormat) -> StructuredOutputs | None:
    if (asked.type == "json_schema") is (asked.json_schema is None):
        raise RequestError(f"response_format of type {asked.type!r} and its json_schema do not fit together")
    if asked.type == "json_object":
        return StructuredOutputs(json_object=True)
    if asked.json_schema is None:
        return None
    return StructuredOutputs(json=asked.json_schema.schema_ or {})


def _token_id(key: str) -> int:
    """JSON's keys are text, token ids are not."""
    if not (key.isascii() and key.isdigit() and len(key) <= 18):
        raise RequestError(f"logit_bias holds {shown(key)}, which is not a token id")
    return int(key)


def usage(prompt_tokens: int, completion_tokens: int, *, cached: int) -> dict[str, Any]:
    """Token counts of a request, as OpenAI's ``usage``; ``cached`` prompt tokens came from the prefix cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
