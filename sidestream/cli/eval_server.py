"""A server as ``sidestream eval`` asks it: which model it has, then whole answers, several at a time."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from sidestream.core.sampling_params import SamplingParams
from sidestream.errors import SidestreamError


@dataclass(frozen=True, slots=True)
class Answer:
    """To the prompt at ``index``; the server may not say how it ended and how many tokens it has."""

    index: int
    text: str
    finish_reason: str | None
    tokens: int | None


class Server:
    """Asks for completions and chats.

    Args:
        url: ``http://host:port``, with or without ``/v1``.
        name: of the model; None takes the first that the server lists.
    Raises:
        ConfigError: the URL is none.
        SidestreamError: the server cannot be asked.
    """

    def __init__(self, url: str, *, key: str | None, name: str | None) -> None:
        from sidestream.engine.bench.load.http_client import Address

        self._base = str(Address.of(url))
        self._key = key
        self.model = name or self._first_model()

    def answers(self, prompts: list[dict[str, Any]], params: SamplingParams, *, concurrency: int) -> Iterator[Answer]:
        """As they come. What has not been asked when one fails is not asked."""
        fields: dict[str, Any] = {
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            "stop": list(params.stop),
        }
        fields |= {"model": self.model}
        pool = ThreadPoolExecutor(max(1, concurrency))
        try:
            jobs = [pool.submit(self._ask, index, prompt | fields) for index, prompt in enumerate(prompts)]
            for job in as_completed(jobs):
                yield job.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _ask(self, index: int, body: dict[str, Any]) -> Answer:
        chat = "messages" in body
        path = "/v1/chat/completions" if chat else "/v1/completions"
        answer = self._json(path, body)
        try:
            choice = answer["choices"][0]
            text = (choice["message"]["content"] or "") if chat else choice["text"]
            usage = answer.get("usage") or {}
            return Answer(index, text, choice.get("finish_reason"), usage.get("completion_tokens"))
        except (AttributeError, KeyError, IndexError, TypeError):
            raise SidestreamError(f"{self._base}{path} gave no answer of OpenAI's form: {answer!s:.200}") from None

    def _first_model(self) -> str:
        listed = self._json("/v1/models")
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise SidestreamError(f"{self._base}/v1/models is not a list of models: {listed!s:.200}") from None

    def _json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What the server answers, or its own words about why there is none."""
        url = self._base + path
        headers = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode(errors="replace")[:500]
            advice = {401: "; give --api-key", 404: f"; is {self._base} the address of an OpenAI server?"}
            raise SidestreamError(f"{url} answered {error.code}: {said}{advice.get(error.code, '')}") from None
        except urllib.error.URLError as error:
            raise SidestreamError(f"cannot connect to {self._base}: {error.reason}; does a server run there?") from None
        except ValueError as error:
            raise SidestreamError(f"{url} did not answer with JSON: {error}") from None
        except OSError as error:
            raise SidestreamError(f"{url} broke off: {error}") from None
