"""Reads the events of a streamed completion or chat: when tokens came, and how many the server says there were."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeGuard

from sidestream.engine.bench.load.outcome import BAD_EVENT, ERROR_EVENT, UNFINISHED, Answer, RequestFailed
from sidestream.engine.bench.request_times import RequestTimes

DONE = b"[DONE]"
DELTA_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
SHOWN = 200
"""Characters of a message."""


class AnswerReader:
    """One answer in the making.

    An event brings tokens if it has new text (a reasoning's or a tool call's too), or if the server counts more tokens
    in it than before. An event of a role, a reason to finish or a final count brings none.

    Args:
        sent: when the request was sent, seconds of the clock that ``event`` is given.
    """

    def __init__(self, sent: float) -> None:
        self._sent = sent
        self._arrivals: list[float] = []
        self._events = 0
        self._usage: Mapping[str, Any] | None = None
        self._ended = self._done = False

    @property
    def done(self) -> bool:
        """Whether the server said that nothing more will come."""
        return self._done

    def event(self, at: float, data: bytes) -> None:
        """Take in one event.

        Raises:
            RequestFailed: it is malformed, or reports an error.
        """
        if data.strip() == DONE:
            self._done = True
            return
        found = _parsed(data)
        if found.get("error") is not None:
            raise RequestFailed(ERROR_EVENT, error_message(found))
        choices = found.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise RequestFailed(BAD_EVENT, f"no list of choices in {_shown(data)}")
        before = self._counted("completion_tokens") or 0
        if isinstance(found.get("usage"), dict):
            self._usage = found["usage"]
        more = (self._counted("completion_tokens") or 0) > before
        texts = [choice for choice in choices if _has_text(choice)]
        self._events += len(texts)
        brings = bool(texts) or (bool(choices) and more)
        if brings and (not self._arrivals or at > self._arrivals[-1]):  # events that came together are one arrival
            self._arrivals.append(at)
        self._ended = self._ended or any(choice.get("finish_reason") for choice in choices)

    def answer(self, finished: float) -> Answer:
        """The whole answer, once the stream has ended.

        Raises:
            RequestFailed: it ended too soon.
        """
        if not (self._done or self._ended):
            raise RequestFailed(UNFINISHED, f"after {self._events} events with text")
        tokens = self._counted("completion_tokens")
        details = (self._usage or {}).get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        times = RequestTimes(
            sent=self._sent,
            arrivals=tuple(self._arrivals),
            finished=finished,
            completion_tokens=self._events if tokens is None else tokens,
            prompt_tokens=self._counted("prompt_tokens"),
            cached_tokens=cached if _is_count(cached) else None,
        )
        return Answer(times, counted=tokens is not None)

    def _counted(self, name: str) -> int | None:
        value = (self._usage or {}).get(name)
        return value if _is_count(value) else None


def error_message(body: Any) -> str:
    """What an error object says; OpenAI's shape, or whatever there is."""
    if isinstance(body, dict):
        error = body.get("error", body)
        message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
        if message:
            return str(message)[:SHOWN]
    return str(body)[:SHOWN]


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return bool(delta.get("tool_calls")) or any(delta.get(name) for name in DELTA_TEXTS)
    return bool(choice.get("text"))


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        raise RequestFailed(BAD_EVENT, f"not JSON: {_shown(data)}") from None
    if not isinstance(found, dict):
        raise RequestFailed(BAD_EVENT, f"not an object: {_shown(data)}")
    return found


def _shown(data: bytes) -> str:
    return repr(data[:SHOWN].decode("utf-8", errors="replace"))


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
