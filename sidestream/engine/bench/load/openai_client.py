"""Asks a server with the OpenAI API: which model it has, and for streamed answers, timed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from sidestream.engine.bench.load.answer_reader import AnswerReader, error_message
from sidestream.engine.bench.load.event_parser import EventParser
from sidestream.engine.bench.load.http_body import HttpError
from sidestream.engine.bench.load.http_client import Address, Response, connect
from sidestream.engine.bench.load.outcome import CLOSED, CONNECT, NOT_A_STREAM, Answer, RequestFailed
from sidestream.engine.bench.workload import Job
from sidestream.errors import ConfigError, SidestreamError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDPOINTS = (COMPLETIONS, CHAT)
TEMPLATE_FIELDS = ("chat_template_kwargs", "tools")
"""Fields of a chat that change how many tokens its prompt has."""
WHOLE_BODY_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIClient:
    """How requests are put.

    Attributes:
        model: the name that requests carry.
        endpoint: one of ``ENDPOINTS``.
        ignore_eos: ask for answers that nothing but their length ends; servers other than vLLM, SGLang and this one may
            refuse the field.
        continuous_usage: ask for token counts with every event, for models without text.
        extra: further fields of every request.
    Raises:
        ConfigError: naming what is wrong.
    """

    address: Address
    model: str = ""
    endpoint: str = COMPLETIONS
    api_key: str | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    continuous_usage: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise ConfigError(f"endpoint is {self.endpoint!r}, allowed are {' and '.join(ENDPOINTS)}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("the API key must be printable ASCII text")
        if not self.temperature >= 0:
            raise ConfigError(f"temperature is {self.temperature}, at least 0 is needed")

    async def models(self) -> list[dict[str, Any]]:
        """Entries of the server's ``/v1/models``; none if it has no such path.

        Raises:
            SidestreamError: the server cannot be reached, or refuses.
        """
        status, body = await self._whole("GET", "/v1/models")
        if status == 404:
            return []
        if status != 200:
            key = "; give --api-key" if status in (401, 403) else ""
            raise SidestreamError(f"{self.address}/v1/models answered {status}: {_message(body)}{key}")
        try:
            entries = [dict(entry) for entry in json.loads(body)["data"]]
            return [entry | {"id": str(entry["id"])} for entry in entries]
        except (ValueError, LookupError, TypeError):
            raise SidestreamError(f"{self.address}/v1/models is not a list of models: {_message(body)}") from None

    async def version(self) -> str | None:
        """What the server says its version is at ``/version``, as vLLM does; None if it has no such path."""
        status, body = await self._whole("GET", "/version")
        try:
            return str(json.loads(body)["version"]) if status == 200 else None
        except (ValueError, LookupError, TypeError):
            return None

    async def count_tokens(self, text: str) -> int | None:
        """Tokens of the prompt that this text makes, as ``/tokenize`` of vLLM and of this server counts them.

        None if the server has no such path, or cannot count.
        """
        fields: dict[str, Any] = {"model": self.model, "prompt": text}
        if self.endpoint == CHAT:
            fields = {"model": self.model, "messages": [{"role": "user", "content": text}]}
            fields |= {name: self.extra[name] for name in TEMPLATE_FIELDS if name in self.extra}
        status, body = await self._whole("POST", "/tokenize", json.dumps(fields).encode())
        try:
            return int(json.loads(body)["count"]) if status == 200 else None
        except (ValueError, LookupError, TypeError):
            return None

    async def _whole(self, method: str, path: str, data: bytes = b"") -> tuple[int, bytes]:
        """Status and body; SidestreamError if there is none."""
        try:
            async with connect(self.address) as connection:
                response = await connection.ask(method, path, self._headers(), data)
                return response.status, await response.read(WHOLE_BODY_BYTES)
        except (OSError, HttpError) as error:
            raise SidestreamError(f"{self.address} cannot be reached: {error}") from None

    def body(self, job: Job) -> dict[str, Any]:
        """Fields of the request for a job."""
        options: dict[str, Any] = {"include_usage": True}
        if self.continuous_usage:
            options["continuous_usage_stats"] = True
        fields = {"model": self.model, "temperature": self.temperature, "stream": True, "stream_options": options}
        if self.endpoint == CHAT:
            assert isinstance(job.prompt, str)
            fields |= {
                "messages": [{"role": "user", "content": job.prompt}],
                "max_completion_tokens": job.output_len,
            }
        else:
            prompt = job.prompt if isinstance(job.prompt, str) else list(job.prompt)
            fields |= {"prompt": prompt, "max_tokens": job.output_len}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return fields | dict(self.extra)

    async def ask(self, job: Job, on_sent: Callable[[float], None] = lambda at: None) -> Answer:
        """Send one request and read its stream to the end.

        Args:
            on_sent: called with the moment at which the request went out, the connection being open.
        Raises:
            RequestFailed: of any kind but ``TIMEOUT``, for which the caller sees.
        """
        data = json.dumps(self.body(job)).encode()
        try:
            async with connect(self.address) as connection:
                sent = time.perf_counter()
                on_sent(sent)
                try:
                    return await self._answer(await connection.ask("POST", self.endpoint, self._headers(), data), sent)
                except (OSError, HttpError) as error:
                    raise RequestFailed(CLOSED, str(error)) from None
        except OSError as error:
            raise RequestFailed(CONNECT, str(error)) from None

    async def _answer(self, response: Response, sent: float) -> Answer:
        if response.status != 200:
            raise RequestFailed(f"http {response.status}", _message(await response.read(WHOLE_BODY_BYTES)))
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise RequestFailed(NOT_A_STREAM, f"content-type is {kind!r}")
        parser, reader = EventParser(), AnswerReader(sent)
        finished = sent
        async with aclosing(response.pieces()) as pieces:
            async for finished, piece in pieces:
                for data in parser.feed(piece):
                    reader.event(finished, data)
                if reader.done:
                    break
        return reader.answer(finished)

    def _headers(self) -> dict[str, str]:
        headers = {"accept": "text/event-stream, application/json", "content-type": "application/json"}
        return headers | ({"authorization": f"Bearer {self.api_key}"} if self.api_key is not None else {})


def _message(body: bytes) -> str:
    try:
        return error_message(json.loads(body))
    except ValueError:
        return error_message(body.decode("utf-8", errors="replace"))
