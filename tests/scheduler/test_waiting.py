"""Prompts that wait for one that others compute: whom they hold up, what wakes them, and what they cost meanwhile."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from sidestream.cache.prefix_cache import PrefixCache
from tests.scheduler.fake_engine import VOCAB, FakeEngine, make_config, make_request, solo_run
from tests.scheduler.test_random_runs import assert_all_back, assert_answers, drive

STEM = tuple((7 * i) % VOCAB for i in range(160))


def waiting_engine(**overrides: object) -> FakeEngine:
    """Prompts get 4 tokens a step, a block, if one prefills alone."""
    values: dict[str, object] = {"max_num_seqs": 6, "max_num_batched_tokens": 4, "num_blocks": 700, "num_slots": 7}
    values |= {"prefix_caching": True, "needs_snapshots": True, "num_snapshots": 24, "shared_prefix_wait": 1_000}
    return FakeEngine(make_config(**(values | overrides)))


def add_waiters(engine: FakeEngine, count: int, *, shared: Callable[[int], int] = lambda i: 120) -> None:
    """Each with so many tokens of the stem and a few of its own."""
    for i in range(count):
        own = (i % VOCAB, i // VOCAB % VOCAB, 49)
        engine.add(make_request(f"w{i}", (*STEM[: shared(i)], *own), max_tokens=1))


def starts(engine: FakeEngine) -> list[str]:
    """Requests in the order in which they began to run, the last time."""
    names = [c.request_id for step in engine.steps for c in step.chunks if c.start == engine.cached[c.request_id]]
    return list(dict.fromkeys(names))


class Work:
    """Counts the lines of the scheduler and its caches that run in this block, and the looks into the prefix cache."""

    def __enter__(self) -> Work:
        self.lines = self.looks = 0
        self._find = PrefixCache.find
        sys.settrace(self._enter)
        return self

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        path = frame.f_code.co_filename
        if not any(part in path for part in ("/sidestream/scheduler/", "/sidestream/cache/")):
            return None
        self.looks += frame.f_code is self._find.__code__
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.lines += event == "line"
        return self._line

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


def step_work(engine: FakeEngine) -> Work:
    """Run a step; what planning it took."""
    with Work() as work:
        step = engine.scheduler.schedule()
    assert step is not None
    engine.steps.append(step)
    engine.scheduler.commit(step, engine.execute(step))
    return work


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("shared", [lambda i: 120, lambda i: 40 + 4 * (i % 30)], ids=["one place", "thirty places"])
def test_a_thousand_prompts_that_wait_hold_up_nobody(hybrid: bool, shared: Callable[[int], int]) -> None:
    engine = waiting_engine(needs_snapshots=hybrid, uses_slots=hybrid, max_num_batched_tokens=8)
    engine.add(make_request("first", (*STEM, 1), max_tokens=1))
    add_waiters(engine, 1_000, shared=shared)
    engine.add(make_request("unrelated", (3, 1, 2), max_tokens=1))
    engine.step()
    assert {c.request_id for c in engine.steps[0].chunks} == {"first", "unrelated"}
    engine.step()
    engine.add(make_request("later", (3, 1, 3), max_tokens=1))
    engine.step()
    assert {c.request_id for c in engine.steps[2].chunks} == {"first", "later"}
    assert engine.scheduler.num_waiting == 1_000


@pytest.mark.parametrize("shared", [lambda i: 120, lambda i: 40 + 4 * (i % 20)], ids=["one place", "twenty places"])
def test_prompts_that_wait_cost_a_step_nothing(shared: Callable[[int], int]) -> None:
    """Counted in lines of Python, a step with 1,000 of them does what one with 50 does, to the line."""

    def works(count: int) -> list[int]:
        engine = waiting_engine(max_num_batched_tokens=8)
        engine.add(make_request("first", (*STEM, 1), max_tokens=1))
        engine.add(make_request("stream", (2,), max_tokens=100))
        engine.step()
        add_waiters(engine, count, shared=shared)
        engine.step()  # looks at each once
        return [step_work(engine).lines for _ in range(4)]

    assert works(50) == works(1_000)


def test_whoever_takes_an_aborted_prompt_s_place_is_found_in_few_looks() -> None:
    """Whatever number waited for it: they wait for the next of them, not looked at one by one."""
    for count in (50, 1_000):
        engine = waiting_engine()
        engine.add(make_request("first", (*STEM, 1), max_tokens=1))
        add_waiters(engine, count, shared=lambda i: 80 if i == 0 else 120)
        for _ in range(4):
            engine.step()
        assert engine.abort("first")
        work = step_work(engine)
        assert [c.request_id for c in engine.steps[-1].chunks] == ["w0"]
        assert work.looks <= 4, "w0, once more as it is admitted, and the first of the others"
        engine.scheduler.check_integrity()
        engine.add(make_request("unrelated", (3, 1, 2), max_tokens=1))
        engine.step()
        engine.step()
        assert engine.reasons.keys() >= {"unrelated"}


def test_a_step_looks_at_no_more_than_can_run_once_the_prefix_is_there() -> None:
    engine = waiting_engine(max_num_batched_tokens=24)
    engine.add(make_request("first", (*STEM, 1), max_tokens=1))
    add_waiters(engine, 500)
    engine.step()
    while engine.scheduler.num_waiting == 500:
        engine.step()
    for _ in range(20):
        assert step_work(engine).looks <= 2 * engine.config.max_running
    engine.run()
    assert starts(engine) == ["first", *(f"w{i}" for i in range(500))], "in the order in which they came"
    assert set(engine.cached.values()) == {0, 120}


@pytest.mark.parametrize("end", ["there", "finished", "aborted", "preempted", "patience"])
def test_what_wakes_those_that_wait(end: str) -> None:
    blocks = 40 if end == "preempted" else 700
    patience = 6 if end == "patience" else 1_000
    engine = waiting_engine(num_blocks=blocks, shared_prefix_wait=patience, max_num_batched_tokens=6)
    engine.add(make_request("older", (1, 2, 3), max_tokens=150))
    engine.step()
    own = () if end == "finished" else (1, 2, 3, 4, 5, 6, 7, 8)
    engine.add(make_request("first", (*STEM[:120], *own), max_tokens=20))
    engine.step()
    add_waiters(engine, 40)
    for _ in range(3):
        engine.step()
    if end == "aborted":
        assert engine.abort("first")
    engine.run()
    assert not engine.scheduler.num_waiting
    stats = engine.scheduler.prefix_stats
    assert (stats.gave_up > 0) == (end == "patience")
    assert (engine.scheduler.num_preemptions > 0) == (end == "preempted")
    for i in range(40):
        own_tokens = engine.prompts[f"w{i}"]
        assert engine.outputs[f"w{i}"] == solo_run(make_request("w", own_tokens, max_tokens=1), engine.config)[0]
    assert_all_back(engine)
    if end in ("there", "finished"):
        assert {engine.cached[f"w{i}"] for i in range(40)} == {120}


def test_one_of_them_that_is_aborted_leaves_the_others_waiting() -> None:
    engine = waiting_engine()
    engine.add(make_request("first", (*STEM, 1), max_tokens=1))
    add_waiters(engine, 5)
    engine.step()
    for name in ("w0", "w4", "w2"):
        assert engine.abort(name)
        engine.scheduler.check_integrity()
    engine.run()
    assert starts(engine) == ["first", "w1", "w3"]
    assert (engine.cached["w1"], engine.cached["w3"]) == (120, 120)
    assert_all_back(engine)


def test_a_prompt_whose_turn_does_not_come_keeps_those_that_wait_for_it() -> None:
    """It finds no blocks for as long as another one runs; nobody is looked at meanwhile but it."""
    engine = waiting_engine(num_blocks=52, max_num_batched_tokens=64)
    engine.add(make_request("large", 180, max_tokens=12))
    for _ in range(3):
        engine.step()
    engine.add(make_request("second", (*STEM[:60], 1), max_tokens=1))
    add_waiters(engine, 300, shared=lambda i: 8 + 4 * (i % 10))
    engine.step()
    assert [step_work(engine).looks for _ in range(5)] == [1] * 5
    assert {c.request_id for step in engine.steps for c in step.chunks} == {"large"}
    engine.run()
    assert starts(engine)[:3] == ["large", "second", "w0"]
    assert engine.scheduler.prefix_stats.hits == 300


@pytest.mark.parametrize("hybrid", [True, False])
def test_loads_in_which_nearly_all_wait_end_with_their_answers(hybrid: bool) -> None:
    """Prompts that begin alike and part anywhere, on a small pool, with aborts; all is recounted after every step."""
    waited = preemptions = gave_up = 0
    for seed in range(40):
        rng = random.Random(seed)
        config = make_config(
            max_num_seqs=rng.randint(1, 6),
            max_num_batched_tokens=rng.choice((1, 3, 7, 16)),
            num_blocks=rng.randint(14, 40),
            num_slots=7,
            uses_slots=hybrid,
            prefill_quantum=5,
            max_model_len=48,
            prefix_caching=True,
            needs_snapshots=hybrid,
            num_snapshots=rng.randint(1, 12),
            first_guess=rng.choice((4, 128)),
            shared_prefix_wait=rng.choice((2, 20, 500)),
        )
        tree = [STEM[:36], (*STEM[:20], *range(16)), (*STEM[:8], *range(9, 35))]
        requests = []
        for i in range(60):
            stem = rng.choice(tree)
            prompt = (*stem[: rng.randint(4, len(stem))], *(rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))))
            requests.append(make_request(f"r{i}", prompt, max_tokens=rng.randint(1, 8)))
        engine = FakeEngine(config, depth=rng.choice((0, 1)))
        drive(engine, requests, rng, abort_share=rng.choice((0.0, 0.1)))
        assert_answers(engine, requests)
        assert_all_back(engine)
        waited += engine.scheduler.prefix_stats.waited
        gave_up += engine.scheduler.prefix_stats.gave_up
        preemptions += engine.scheduler.num_preemptions
    assert waited > 80
    assert gave_up > 5
    assert preemptions > 20
