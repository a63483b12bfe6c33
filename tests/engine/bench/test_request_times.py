"""Latencies and rates of requests whose events came at known times."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sidestream.engine.bench.load.objectives import Objectives
from sidestream.engine.bench.request_times import Latencies, Rates, RequestTimes
from sidestream.engine.bench.summary import Spread, Summary, percentile
from sidestream.errors import ConfigError


def times(sent: float, *arrivals: float, tokens: int, finished: float | None = None, prompt: int = 10) -> RequestTimes:
    end = finished if finished is not None else arrivals[-1]
    return RequestTimes(sent, arrivals, end, tokens, prompt_tokens=prompt)


def test_a_token_an_event() -> None:
    found = times(10.0, 10.5, 10.6, 10.8, tokens=3, finished=10.9)
    assert found.ttft == pytest.approx(500)
    assert found.tpot == pytest.approx(150)
    assert found.itl == pytest.approx((100, 200))
    assert found.e2e == pytest.approx(900)


def test_several_tokens_an_event() -> None:
    """Twelve tokens in three events: the time per token is that of tokens, the gaps are those that were seen."""
    found = times(0.0, 1.0, 1.4, 2.1, tokens=12)
    assert found.tpot == pytest.approx(1100 / 11)
    assert found.itl == pytest.approx((400, 700))


def test_what_was_not_seen_is_unknown() -> None:
    assert times(0.0, 1.0, tokens=8).tpot is None  # all at once
    assert times(0.0, 1.0, tokens=1).tpot is None
    silent = times(0.0, tokens=4, finished=2.0)
    assert (silent.ttft, silent.tpot, silent.itl) == (None, None, ())
    assert silent.e2e == 2000
    found = Latencies.of([silent])
    assert (found.ttft, found.tpot, found.itl) == (None, None, None)
    assert found.as_json()["ttft_ms"] is None
    assert [name for name, _ in found.items()] == ["e2e"]


def test_latencies_of_many() -> None:
    """ITL is of all gaps, not of requests; the others are of those requests that have them."""
    found = Latencies.of(
        [times(0.0, 0.1, 0.2, 0.3, tokens=3), times(0.0, 0.3, tokens=1), times(0.0, 0.2, 0.5, tokens=2)]
    )
    assert found.ttft is not None
    assert found.tpot is not None
    assert found.itl is not None
    assert (found.ttft.count, found.tpot.count, found.itl.count) == (3, 2, 3)
    assert found.ttft.p50 == pytest.approx(200)
    assert found.tpot.max == pytest.approx(300)
    assert found.itl.mean == pytest.approx(500 / 3)


def test_percentiles_are_those_of_numpy() -> None:
    rng = random.Random(3)
    for count in (1, 2, 3, 10, 101):
        values = [rng.expovariate(1.0) for _ in range(count)]
        summary = Summary.of(values)
        assert summary is not None
        expected = np.percentile(values, [0, 50, 90, 99, 100])
        assert (summary.min, summary.p50, summary.p90, summary.p99, summary.max) == pytest.approx(tuple(expected))
        assert summary.mean == pytest.approx(np.mean(values))
        assert summary.count == count
    assert percentile([1.0, 3.0], 0.25) == 1.5
    assert Summary.of([]) is None


def test_rates() -> None:
    asked = [times(0.0, 1.0, tokens=30, prompt=100), times(0.0, 1.5, tokens=10, prompt=60)]
    found = Rates.of(asked, 2.0)
    assert (found.requests_per_s, found.output_tokens_per_s, found.total_tokens_per_s) == (1.0, 20.0, 100.0)
    unknown = Rates.of([*asked, RequestTimes(0.0, (1.0,), 1.0, 10)], 2.0)
    assert (unknown.prompt_tokens, unknown.total_tokens_per_s) == (None, None)
    assert unknown.output_tokens_per_s == 25.0


def test_spread_of_repeats() -> None:
    assert Spread.of([3.0, 1.0, 2.5]).as_json() == {"median": 2.5, "min": 1.0, "max": 3.0}


def test_objectives() -> None:
    """All limits must be kept; a limit itself is kept."""
    bounds = Objectives.of(["ttft:500", "tpot:100", "e2e:1000"])
    assert bounds.met_by(times(0.0, 0.5, 0.6, tokens=2, finished=1.0))
    assert not bounds.met_by(times(0.0, 0.501, 0.6, tokens=2))
    assert not bounds.met_by(times(0.0, 0.5, 0.61, tokens=2))
    assert not bounds.met_by(times(0.0, 0.5, 0.6, tokens=2, finished=1.01))
    assert bounds.met_by(times(0.0, 0.5, tokens=9))  # no time between its tokens was seen
    assert not bounds.met_by(times(0.0, tokens=9, finished=0.1))  # its tokens were never seen
    assert Objectives.of([]).met_by(times(0.0, 9.0, tokens=1))


@pytest.mark.parametrize(
    "text", ["ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:0", "ttft:inf", "ttft:nan", "itl:5", ":5"]
)
def test_bad_objectives_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="must be like ttft:200") as caught:
        Objectives.of([text])
    assert repr(text) in str(caught.value)


def test_an_objective_stands_once() -> None:
    with pytest.raises(ConfigError, match="ttft twice"):
        Objectives.of(["ttft:5", "ttft:6"])
