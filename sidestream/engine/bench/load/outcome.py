"""What became of one request: its times, or the kind of its failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sidestream.engine.bench.request_times import RequestTimes

CONNECT = "no connection"
TIMEOUT = "timeout"
CLOSED = "closed early"
NOT_A_STREAM = "not a stream"
BAD_EVENT = "bad event"
ERROR_EVENT = "error event"
UNFINISHED = "unfinished"
FAILURES = {
    CONNECT: "the server could not be reached",
    TIMEOUT: "no end within the time allowed",
    CLOSED: "the connection closed, or broke off, before the answer's end",
    NOT_A_STREAM: "the answer holds no server-sent events",
    BAD_EVENT: "an event is no JSON object of OpenAI's shape",
    ERROR_EVENT: "the server reported an error in the stream",
    UNFINISHED: "the stream ended with neither [DONE] nor a reason to finish",
}
"""Kinds of failure; a status other than 200 is a kind too, as ``http 503``."""


class RequestFailed(Exception):  # noqa: N818  an outcome, which travels as an exception
    """A request failed, in one of the ways of ``FAILURES``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that was answered whole.

    Attributes:
        counted: whether the server counted tokens. Otherwise ``times.completion_tokens`` is a number of events.
    """

    times: RequestTimes
    counted: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that was not.

    Attributes:
        message: the server's own words, where it had any.
        sent, finished: seconds, on the clock of ``RequestTimes``; ``sent`` is None if it never came to that.
    """

    kind: str
    message: str
    sent: float | None
    finished: float


def failures_by_kind(failures: Iterable[Failure]) -> dict[str, dict[str, Any]]:
    """How many of each kind, most frequent first, with the message of the first."""
    listed = list(failures)
    counts = Counter(failure.kind for failure in listed)
    first = {failure.kind: failure.message for failure in reversed(listed)}
    return {kind: {"count": count, "message": first[kind]} for kind, count in counts.most_common()}
