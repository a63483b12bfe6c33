"""When the tokens of requests came, and the latencies that follow: TTFT, TPOT, ITL, E2E."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sidestream.engine.bench.summary import Summary

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2e": "whole request",
}


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One request that was answered. Times are seconds of one clock, latencies milliseconds.

    Attributes:
        sent: when it was asked.
        arrivals: when new tokens came, ascending: one each time, however many tokens that were.
        finished: when nothing more could come.
        completion_tokens: generated.
        prompt_tokens, cached_tokens: of the prompt, and those of them taken from a prefix cache; None where unknown.
    """

    sent: float
    arrivals: tuple[float, ...]
    finished: float
    completion_tokens: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def ttft(self) -> float | None:
        """Until the first tokens; None if none could be seen."""
        return 1e3 * (self.arrivals[0] - self.sent) if self.arrivals else None

    @property
    def tpot(self) -> float | None:
        """From the first arrival to the last, over the tokens behind the first; None if there was one arrival."""
        if len(self.arrivals) < 2 or self.completion_tokens < 2:
            return None
        return 1e3 * (self.arrivals[-1] - self.arrivals[0]) / (self.completion_tokens - 1)

    @property
    def itl(self) -> tuple[float, ...]:
        """Between one arrival and the next."""
        return tuple(1e3 * (b - a) for a, b in pairwise(self.arrivals))

    @property
    def e2e(self) -> float:
        """Until the end of the answer."""
        return 1e3 * (self.finished - self.sent)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of many requests, in milliseconds; None where no request had the figure. ITL is of all gaps of all requests."""

    ttft: Summary | None
    tpot: Summary | None
    itl: Summary | None
    e2e: Summary | None

    @classmethod
    def of(cls, requests: Sequence[RequestTimes]) -> Latencies:
        return cls(
            ttft=Summary.of(r.ttft for r in requests if r.ttft is not None),
            tpot=Summary.of(r.tpot for r in requests if r.tpot is not None),
            itl=Summary.of(gap for r in requests for gap in r.itl),
            e2e=Summary.of(r.e2e for r in requests),
        )

    def items(self) -> list[tuple[str, Summary]]:
        """Name and figures of those that there are."""
        found = [(name, getattr(self, name)) for name in LATENCIES]
        return [(name, summary) for name, summary in found if summary is not None]

    def as_json(self) -> dict[str, Any]:
        known = dict(self.items())
        return {f"{name}_ms": known[name].as_json() if name in known else None for name in LATENCIES}


@dataclass(frozen=True, slots=True)
class Rates:
    """Work done over the time that it took.

    Attributes:
        prompt_tokens: None where not every request's are known; so is the rate of all tokens then.
    """

    seconds: float
    requests: int
    prompt_tokens: int | None
    completion_tokens: int

    @classmethod
    def of(cls, requests: Sequence[RequestTimes], seconds: float) -> Rates:
        prompts = [r.prompt_tokens for r in requests if r.prompt_tokens is not None]
        known = sum(prompts) if len(prompts) == len(requests) else None
        return cls(seconds, len(requests), known, sum(r.completion_tokens for r in requests))

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds

    @property
    def output_tokens_per_s(self) -> float:
        return self.completion_tokens / self.seconds

    @property
    def total_tokens_per_s(self) -> float | None:
        """Tokens of prompts and of answers."""
        if self.prompt_tokens is None:
            return None
        return (self.prompt_tokens + self.completion_tokens) / self.seconds

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "total_tokens_per_s": self.total_tokens_per_s,
        }
