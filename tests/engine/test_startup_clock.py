"""Phases of a start: together they are the whole, whatever becomes of the boundaries between them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sidestream.config.engine import EngineConfig
from sidestream.engine.build import build_engine
from sidestream.engine.bundled import bundled_model
from sidestream.engine.startup_clock import PhaseProgress, StartupClock, process_start
from tests.engine.sim.harness import make_model


class Time:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.told: list[PhaseProgress] = []

    def __call__(self) -> float:
        return self.now

    def clock(self, origin: float = 90.0) -> StartupClock:
        return StartupClock("first", origin=origin, now=self, tell=self.told.append)


def test_every_second_belongs_to_one_phase() -> None:
    passing = Time()
    clock = passing.clock()
    for name, seconds in (("a", 1.5), ("b", 0.25), ("a", 2.0), ("c", 0.125)):
        clock.begin(name)
        passing.now += seconds
    assert clock.current == "c"
    assert clock.end() == 13.875
    assert clock.phases == {"first": 10.0, "a": 3.5, "b": 0.25, "c": 0.125}
    assert sum(clock.phases.values()) == 13.875
    assert clock.current is None
    with pytest.raises(AssertionError):
        clock.begin("after the end")


@pytest.mark.parametrize(("at", "boundary"), [(97.0, 97.0), (80.0, 95.0), (120.0, 100.0)])
def test_a_boundary_that_another_process_names_lies_between_the_last_one_and_now(at: float, boundary: float) -> None:
    passing = Time()
    clock = passing.clock()
    clock.begin("spawn", at=95.0)
    clock.begin("imports", at=at)
    passing.now = 101.0
    assert clock.end() == 11.0
    assert clock.phases == {"first": 5.0, "spawn": boundary - 95.0, "imports": 101.0 - boundary}
    assert [progress.at for progress in passing.told] == [90.0, 95.0, boundary]


def test_progress_is_told_now_and_then_and_at_the_end() -> None:
    passing = Time()
    clock = passing.clock()
    captured = clock.counting("graphs", 30)
    for _ in range(30):
        passing.now += 0.03
        captured("a shape")
    told = [(progress.name, progress.done, progress.total) for progress in passing.told[1:]]
    assert told[0] == ("graphs", 0, 30)
    assert told[-1] == ("graphs", 30, 30)
    assert [done for _, done, _ in told] == [0, 4, 8, 12, 16, 20, 24, 28, 30]


def test_work_that_is_gone_through_is_a_phase() -> None:
    passing = Time()
    clock = passing.clock()
    for _ in clock.counted("compile", range(3), then="probe"):
        assert clock.current == "compile"
        passing.now += 1
    assert clock.current == "probe"
    assert list(clock.counted("nothing", [], then="rest")) == []
    clock.end()
    assert clock.phases == {"first": 10.0, "compile": 3.0, "probe": 0.0, "rest": 0.0}


def test_a_process_began_before_now() -> None:
    assert 0 < time.monotonic() - process_start() < 24 * 3600


def test_a_plain_build_is_timed_from_the_start_of_the_process_to_its_end() -> None:
    before = time.monotonic() - process_start()
    built = build_engine(bundled_model(), EngineConfig(device="cpu", max_num_seqs=2))
    after = time.monotonic() - process_start()
    assert list(built.startup) == ["imports", "config", "weights", "caches"]
    assert before - 0.1 < sum(built.startup.values()) < after + 0.1


def test_a_build_goes_on_with_the_clock_it_is_given(tmp_path: Path) -> None:
    """On a device that captures, each shape is told; weights are told in bytes."""
    make_model("glm5_next", tmp_path)
    told: list[PhaseProgress] = []
    clock = StartupClock(tell=told.append)
    settings = {"device": "sim", "max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 32, "block_size": 8}
    built = build_engine(tmp_path, EngineConfig(**settings), clock=clock)  # type: ignore[arg-type]
    assert list(dict.fromkeys(progress.name for progress in told)) == [
        "imports",
        "config",
        "weights",
        "caches",
        "graphs",
    ]
    assert clock.current == "graphs"
    assert built.runner.graphs is not None
    shapes = len(built.runner.graphs.dispatcher.captures())
    assert {progress.total for progress in told if progress.name == "graphs"} == {shapes}
    assert [progress.done for progress in told if progress.name == "graphs"][-1] == shapes
    assert {progress.total for progress in told if progress.name == "weights"} == {built.weight_bytes}
