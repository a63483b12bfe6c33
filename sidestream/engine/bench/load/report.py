"""What a load found: rates, latencies, goodput and failures, as plain data and as lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sidestream.engine.bench.environment import origin
from sidestream.engine.bench.load.generator import LoadRun
from sidestream.engine.bench.load.objectives import Objectives
from sidestream.engine.bench.load.outcome import failures_by_kind
from sidestream.engine.bench.request_times import LATENCIES, Latencies, Rates
from sidestream.engine.bench.summary import Summary


@dataclass(frozen=True, slots=True)
class ServeReport:
    """One run against one server.

    Attributes:
        server: what is known of it: address, model, and the options if it was started for this.
        workload: what was asked, and how.
    """

    run: LoadRun
    server: dict[str, Any]
    workload: dict[str, Any]
    objectives: Objectives

    @property
    def rates(self) -> Rates:
        """Of requests that were answered."""
        return Rates.of([answer.times for answer in self.run.answers], self.run.seconds)

    @property
    def latencies(self) -> Latencies:
        """Of requests that were answered, from sending on."""
        return Latencies.of([answer.times for answer in self.run.answers])

    @property
    def uncounted(self) -> int:
        """Answers whose tokens the server did not count: events with text stand for them."""
        return sum(not answer.counted for answer in self.run.answers)

    @property
    def good(self) -> int:
        """Requests that met every objective."""
        return sum(self.objectives.met_by(answer.times) for answer in self.run.answers)

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens from a prefix cache; None if the server told for no request."""
        told = [a.times.cached_tokens for a in self.run.answers if a.times.cached_tokens is not None]
        return sum(told) if told else None

    @property
    def delays(self) -> Summary | None:
        """Milliseconds by which requests went out late."""
        return Summary.of(1e3 * delay for delay in self.run.delays)

    def as_json(self) -> dict[str, Any]:
        """Plain data; times in ms where a name says so."""
        delays = self.delays
        goodput = None
        if self.objectives.limits:
            goodput = {
                "objectives_ms": self.objectives.limits,
                "requests": self.good,
                "requests_per_s": self.good / self.run.seconds,
            }
        return {
            "kind": "serve",
            **self.server,
            **origin(),
            "workload": self.workload,
            "failed": len(self.run.failures),
            "failures": failures_by_kind(self.run.failures),
            **self.rates.as_json(),
            "cached_tokens": self.cached_tokens,
            "requests_without_usage": self.uncounted,
            "max_in_flight": self.run.max_in_flight,
            "goodput": goodput,
            **self.latencies.as_json(),
            "send_delay_ms": None if delays is None else delays.as_json(),
        }

    @property
    def prompt_length(self) -> str:
        """Tokens of a prompt, as the server counted them where it did."""
        asked, found = self.workload["input_len"], self.rates.prompt_tokens
        if found is None or found == asked * self.rates.requests:
            return f"{asked} tokens"
        return f"{found / self.rates.requests:.1f} tokens on average ({asked} were asked for)"

    def lines(self) -> Iterator[str]:
        """For people; a table of latencies is apart."""
        rates, total = self.rates, self.rates.total_tokens_per_s
        yield (
            f"{rates.requests} answered, {len(self.run.failures)} failed in {rates.seconds:.2f} s, "
            f"at most {self.run.max_in_flight} at once"
        )
        whole = "unknown in all" if total is None else f"{total:,.0f} with prompts"
        yield (
            f"{rates.requests_per_s:.2f} requests/s, {rates.output_tokens_per_s:,.0f} output tokens/s, {whole}; "
            f"{rates.completion_tokens:,} tokens were generated"
        )
        if rates.prompt_tokens is not None:
            cached = "" if self.cached_tokens is None else f", {self.cached_tokens:,} of them from a prefix cache"
            yield f"{rates.prompt_tokens:,} prompt tokens{cached}"
        if self.objectives.limits:
            limits = ", ".join(f"{name} {limit:g} ms" for name, limit in self.objectives.limits.items())
            yield f"goodput {self.good / self.run.seconds:.2f} requests/s: {self.good} kept to {limits}"
        delays = self.delays
        if delays is not None:
            yield f"sent late by {delays.p50:.1f} ms (median; p99 {delays.p99:.1f}), which is in no latency"

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Of the table of latencies: name, then mean, p50, p90, p99, max in ms."""
        for name, summary in self.latencies.items():
            figures = (summary.mean, summary.p50, summary.p90, summary.p99, summary.max)
            yield (f"{name.upper()}, {LATENCIES[name]}", *(f"{value:,.2f}" for value in figures))

    def warnings(self) -> Iterator[str]:
        """What a reader must know before believing the figures."""
        for kind, found in failures_by_kind(self.run.failures).items():
            yield f"{found['count']} requests failed: {kind}: {found['message']}"
        if self.uncounted:
            yield f"the server counted no tokens for {self.uncounted} requests: events with text are taken for tokens"
        asked = self.workload["output_len"], self.workload["range_ratio"]
        made = [answer.times.completion_tokens for answer in self.run.answers if answer.counted]
        if made and asked[1] == 0 and min(made) < asked[0]:
            yield f"answers have {min(made)} to {max(made)} tokens, {asked[0]} were asked for"
