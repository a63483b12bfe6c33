"""Service-level objectives: latencies that a request must keep to count as good."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from sidestream.engine.bench.request_times import RequestTimes
from sidestream.errors import ConfigError

NAMES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Objectives:
    """Upper bounds in milliseconds, by latency."""

    limits: dict[str, float]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Objectives:
        """Each like ``ttft:200``.

        Raises:
            ConfigError: one is not.
        """
        limits: dict[str, float] = {}
        for text in texts:
            name, colon, value = text.partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = math.nan
            if not colon or name not in NAMES or not 0 < limit < math.inf:
                raise ConfigError(f"goodput is {text!r}; it must be like ttft:200 (ms), of {', '.join(NAMES)}")
            if name in limits:
                raise ConfigError(f"goodput names {name} twice")
            limits[name] = limit
        return cls(limits)

    def met_by(self, times: RequestTimes) -> bool:
        """Whether a request keeps all of them. Tokens that never showed are late; a single arrival has no TPOT."""
        found = {
            "ttft": times.ttft if times.ttft is not None else math.inf,
            "tpot": times.tpot or 0.0,
            "e2e": times.e2e,
        }
        return all(found[name] <= limit for name, limit in self.limits.items())
