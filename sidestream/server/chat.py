"""``/v1/chat/completions``: a conversation in, the next message out."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sidestream.core.outputs import CompletionOutput, RequestOutput
from sidestream.core.request import FinishReason
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.async_engine import Delta
from sidestream.engine.input_processor import ProcessedPrompt
from sidestream.errors import RequestError
from sidestream.server.answer_pieces import (
    AnswerParser,
    CallArguments,
    CallStart,
    Content,
    Piece,
    Reasoning,
)
from sidestream.server.chat_prompt import content_text, tokenize_chat
from sidestream.server.errors import JSONAnswer
from sidestream.server.event_stream import event_stream, unless_gone
from sidestream.server.logprobs import chat_logprobs
from sidestream.server.parsers import opens_thinking, parser_for
from sidestream.server.protocol import ChatRequest
from sidestream.server.service import Service, sampling_params, usage
from sidestream.server.tool_choice import ToolChoice, constrain


async def create_chat_completion(service: Service, body: ChatRequest, request: Request) -> Response:
    """Answer one request, whole or streamed."""
    engine = service.engine
    service.check_model(body.model)
    service.check_sequences(1, body.n)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs is given, which needs logprobs to be true")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    choice = ToolChoice(body, service.answer_parser)
    asked = sampling_params(body, max_tokens=_max_tokens(body), logprobs=logprobs)
    if choice.strict:
        await asyncio.to_thread(choice.form, asked.structured_outputs)  # large schemas hold up nobody's prompt
    params, token_ids, thinking = await engine.tokenizing(
        lambda: _prepare(engine.tokenizer, body, choice, asked, parser=service.answer_parser)
    )
    (prompt,) = await engine.process([({"prompt_token_ids": token_ids, "cache_salt": body.cache_salt}, params)])
    answer = _Answer(service, body, prompt, parser_for(service.answer_parser, thinking, choice.tools), choice)
    if body.stream:
        return await event_stream(request.receive, answer.events(), on_gone=service.metrics.disconnected)
    return JSONAnswer(await unless_gone(request.receive, answer.whole()))


def _prepare(
    tokenizer: Any, body: ChatRequest, choice: ToolChoice, asked: SamplingParams, *, parser: str
) -> tuple[SamplingParams, list[int], bool]:
    """Sampling, prompt, and whether the prompt ends within reasoning."""
    text, token_ids = tokenize_chat(
        tokenizer,
        body.messages,
        tools=choice.tools,
        kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    continued = content_text(body.messages[-1]) if body.continue_final_message else ""
    thinking = opens_thinking(text, continued=continued)
    params = constrain(asked, choice, parser=parser, prompt=text, thinking=thinking, tokenizer=tokenizer)
    return params, token_ids, thinking


def _max_tokens(body: ChatRequest) -> int | None:
    """All the room there is, unless one of two fields says less."""
    given = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(given) > 1:
        raise RequestError(
            f"max_completion_tokens is {body.max_completion_tokens} and max_tokens {body.max_tokens}; give one of them"
        )
    return given.pop() if given else None


class _Answer:
    """One request's answer in the making.

    Args:
        parser: makes one parser a completion.
    """

    def __init__(
        self,
        service: Service,
        body: ChatRequest,
        prompt: ProcessedPrompt,
        parser: Callable[[], AnswerParser],
        choice: ToolChoice,
    ) -> None:
        self._service = service
        self._body = body
        self._tools = choice
        self._prompt = prompt
        self._parsers = [parser() for _ in prompt.requests]
        self._called = [False] * len(prompt.requests)
        self._started = [False] * len(prompt.requests)
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.settings.model_name,
        }

    async def whole(self) -> dict[str, Any]:
        output: RequestOutput | None = None
        async with aclosing(self._service.run(self._head["id"], [self._prompt])) as arrivals:
            async for deltas in arrivals:
                output = deltas[-1].output
        assert output is not None, "a prompt ended without a token"
        choices = [self._choice(completion) for completion in output.outputs]
        generated = sum(len(completion.token_ids) for completion in output.outputs)
        return self._head | {
            "object": "chat.completion",
            "choices": choices,
            "usage": self._usage(generated, output),
        }

    async def events(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        options, generated = self._body.stream_options, 0
        every = options is not None and bool(options.continuous_usage_stats)
        head = self._head | {"object": "chat.completion.chunk"}
        output: RequestOutput | None = None
        async with aclosing(self._service.run(self._head["id"], [self._prompt])) as arrivals:
            async for deltas in arrivals:
                chunks = []
                for delta in deltas:
                    generated += 1
                    output = delta.output
                    counts = {"usage": self._usage(generated, output)} if every else {}
                    chunks += [head | {"choices": [choice]} | counts for choice in self._chunks(delta)]
                if chunks:
                    yield chunks
        if options is not None and options.include_usage:
            yield [head | {"choices": [], "usage": self._usage(generated, output)}]

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        message = _message(self._pieces(completion.index, completion.text, last=True))
        return {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion.token_ids, completion.logprobs),
            "finish_reason": self._reason(completion.finish_reason, called=bool(message.get("tool_calls"))),
            "stop_reason": completion.stop_reason,
        }

    def _chunks(self, delta: Delta) -> Iterable[dict[str, Any]]:
        """The choices that one token makes: a role first, then what the parser could tell apart, then the reason."""
        index, last = delta.completion_index, delta.finish_reason is not None
        if not self._started[index]:
            self._started[index] = True
            yield _chunk(index, {"role": "assistant", "content": ""})
        pieces = self._pieces(index, delta.text, last=last)
        logprobs = self._logprobs([delta.token_id], None if delta.logprobs is None else [delta.logprobs])
        if logprobs is not None and not pieces:
            pieces = [Content("")]
        for piece in pieces:
            self._called[index] |= isinstance(piece, CallStart)
            yield _chunk(index, _delta(piece)) | {"logprobs": logprobs}
            logprobs = None
        if last:
            reason = self._reason(delta.finish_reason, called=self._called[index])
            yield _chunk(index, {}) | {"finish_reason": reason, "stop_reason": delta.stop_reason}

    def _pieces(self, index: int, text: str, *, last: bool) -> list[Piece]:
        """What more text of a completion tells. Where calls must come all content is a call's beginning, cut off."""
        parser = self._parsers[index]
        pieces = [*parser.push(text), *(parser.finish() if last else ())]
        return [piece for piece in pieces if not (self._tools.forced and isinstance(piece, Content))]

    def _reason(self, reason: FinishReason | None, *, called: bool) -> str | None:
        """``tool_calls`` for calls that the model chose to make, ``stop`` for one that was named: OpenAI's own
        answers, which vLLM follows (its pull request 25054). A cut answer is ``length``, whatever it holds.
        """
        if reason is FinishReason.STOP and called and self._tools.named is None:
            return "tool_calls"
        return None if reason is None else str(reason)

    def _logprobs(self, token_ids: Sequence[int], rows: Sequence[Any] | None) -> dict[str, Any] | None:
        if rows is None:
            return None
        return chat_logprobs(self._service.tokens, token_ids, rows, top=self._body.top_logprobs or 0)

    def _usage(self, generated: int, output: RequestOutput | None) -> dict[str, Any]:
        return usage(len(self._prompt.token_ids), generated, cached=0 if output is None else output.cached_tokens)


def _chunk(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(piece: Piece) -> dict[str, Any]:
    """A piece as a streamed delta."""
    if isinstance(piece, Content):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return {"reasoning_content": piece.text}
    if isinstance(piece, CallStart):
        call = {"index": piece.index, "id": _call_id(), "type": "function"}
        return {"tool_calls": [call | {"function": {"name": piece.name, "arguments": ""}}]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def _message(pieces: Sequence[Piece]) -> dict[str, Any]:
    """All pieces as one message."""
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls.append({"id": _call_id(), "type": "function", "function": {"name": piece.name, "arguments": ""}})
        elif isinstance(piece, CallArguments):
            calls[piece.index]["function"]["arguments"] += piece.text
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
