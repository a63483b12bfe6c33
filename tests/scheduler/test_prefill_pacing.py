"""Prompts beside decoding streams under a cost model: how far they stretch steps, and that they get on."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.scheduler.prefill_pacer import FIRST_TOKENS, LEAST_TOKENS, MOST_STEPS, REFRESH_STEPS, PrefillPacer
from tests.scheduler.fake_engine import make_config, make_request
from tests.scheduler.paced_engine import PacedEngine, chunk_seconds, decode_seconds, paced
from tests.scheduler.test_random_runs import assert_all_back, assert_answers, drive

LEARNING = 12
"""Steps with prefill after which the promise must hold."""


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("streams", [1, 7, 50])
def test_one_long_prompt_at_most_doubles_every_step(streams: int, depth: int) -> None:
    engine = paced(depth=depth)
    engine.decode(streams)
    costs = engine.run_until_done(engine.ask(6_000, max_tokens=1))
    beside = [cost for cost in costs if cost.tokens]
    assert all(cost.decodes == streams for cost in costs)
    assert max(cost.stretch for cost in beside[LEARNING:]) <= 2
    first = decode_seconds(streams) + chunk_seconds(FIRST_TOKENS)
    assert max(cost.seconds for cost in beside[:LEARNING]) <= max(first, 2 * decode_seconds(streams))
    usual = sorted(cost.stretch for cost in beside)[len(beside) // 2]
    assert usual > 1.8, "and it gets the time that it may have"
    assert engine.scheduler.num_paced_steps >= len(beside) - 1


def test_without_a_pacer_it_does_not() -> None:
    engine = paced(pacer=None)
    engine.decode(50)
    costs = engine.run_until_done(engine.ask(6_000, max_tokens=1))
    assert max(cost.stretch for cost in costs) > 10
    assert engine.scheduler.num_paced_steps == 0


@pytest.mark.parametrize("prompts", [2, 3, 5])
def test_several_prompts_may_take_as_long_each(prompts: int) -> None:
    engine = paced()
    engine.decode(50)
    names = [engine.ask(4_000, max_tokens=1) for _ in range(prompts)]
    while len(engine.reasons) == 0:
        engine.step()
    beside = [cost.stretch for cost in engine.costs if cost.tokens]
    assert max(beside) <= 1 + prompts
    assert sorted(beside)[len(beside) // 2] > 0.9 * (1 + prompts) * 0.9
    engine.run_until_done(*names)


def dear_prefill(index: int, decodes: int, tokens: int) -> float:
    """Any prefill costs as much as two or three steps of decodes."""
    return (0.018 + 0.0018 * decodes if decodes else 0.0) + (0.05 + 0.002 * tokens if tokens else 0.0)


def test_short_prompts_by_themselves_go_as_without_a_pacer_and_pile_up_with_one() -> None:
    """At half of what the engine can do; a limit of 0 shows what not to pace them is for."""
    seconds = []
    for pacer in (PrefillPacer(), None, PrefillPacer(short_prompt=0)):
        engine = paced(pacer=pacer, cost=dear_prefill)
        rng, now, due = random.Random(0), 0.0, 0.0
        asked: dict[str, float] = {}
        ended: dict[str, float] = {}
        while len(ended) < 40:
            while len(asked) < 40 and (due <= now or len(asked) == len(ended)):
                now = max(now, due)
                asked[engine.ask(128, max_tokens=32)] = due
                due += rng.expovariate(1.5)
            before = len(engine.costs)
            engine.step()
            now += sum(cost.seconds for cost in engine.costs[before:])
            for name in engine.reasons:
                ended.setdefault(name, now)
        seconds.append(sum(ended[name] - asked[name] for name in asked))
    assert seconds[0] == seconds[1]
    assert seconds[2] > 1.5 * seconds[1]


def test_a_long_prompt_among_short_ones_is_paced() -> None:
    engine = paced(cost=dear_prefill)
    engine.decode(2)
    engine.ask(257, max_tokens=1)
    engine.run_until_done(*[engine.ask(100, max_tokens=1) for _ in range(3)])
    assert engine.scheduler.num_paced_steps > 0


def test_a_backlog_of_short_prompts_costs_next_to_nothing() -> None:
    """Beside eight streams, 200 prompts of 100 tokens: all are answered in nearly the time that it takes unpaced."""
    seconds = []
    for pacer in (PrefillPacer(), None):
        engine = paced(seats=32, pacer=pacer)
        engine.decode(8)
        engine.run_until_done(*[engine.ask(100, max_tokens=4) for _ in range(200)])
        seconds.append(sum(cost.seconds for cost in engine.costs))
    assert seconds[0] < 1.1 * seconds[1]


def test_prompts_in_the_queue_are_parties_too() -> None:
    """One seat beside eight streams, and a queue before it: the one that has the seat gets through for all of them."""
    engine = paced(seats=9)
    engine.decode(8)
    engine.ask(15_000, max_tokens=1)
    for _ in range(12):
        engine.ask(30, max_tokens=1)
    for _ in range(30):
        engine.step()
    largest = max(cost.stretch for cost in engine.costs)
    assert 10 < largest <= 1 + 13


def test_where_no_prompt_can_go_on_nothing_is_paced() -> None:
    engine = paced(seats=8)
    engine.decode(8)
    for _ in range(2 * REFRESH_STEPS + 5):
        engine.ask(3_000, max_tokens=1)
        engine.step()
    assert engine.scheduler.num_paced_steps == 0
    assert all(cost.stretch == 1 for cost in engine.costs)


def test_nothing_is_held_back_where_nothing_decodes() -> None:
    engine = paced()
    engine.run_until_done(engine.ask(5_000, max_tokens=1))
    assert [cost.tokens for cost in engine.costs] == [1024, 1024, 1024, 1024, 904]
    assert engine.scheduler.num_paced_steps == 0


def test_a_short_prompt_is_not_counted_as_paced() -> None:
    engine = paced()
    engine.decode(50)
    engine.run_until_done(engine.ask(2_000, max_tokens=1))
    before = engine.scheduler.num_paced_steps
    engine.run_until_done(engine.ask(20, max_tokens=1))
    assert engine.scheduler.num_paced_steps == before


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("what", ["everything", "prefill"])
def test_costs_that_change_are_followed(what: str, depth: int) -> None:
    """From some step on all is ten times as slow, or prefill is: then steps stretch as little as before, soon."""
    changed = 100

    def cost(index: int, decodes: int, tokens: int) -> float:
        slow = 10 if index >= changed else 1
        alone = decode_seconds(decodes) * (slow if what == "everything" else 1)
        return alone + (chunk_seconds(tokens) * slow if tokens else 0)

    engine = paced(depth=depth, cost=cost)
    engine.decode(50)
    engine.ask(19_000, max_tokens=1)
    while engine.steps[-1].index < changed + 140:
        engine.step()
    alone = decode_seconds(50) * (10 if what == "everything" else 1)
    after = engine.costs[-140:]
    assert 1.6 < sum(cost.seconds for cost in after[40:]) / (100 * alone) < 2
    wild = [cost for cost in after if cost.seconds > 2.05 * alone and cost.tokens > LEAST_TOKENS]
    assert len(wild) <= 5 + depth, "two that show it, some that were planned before, some until the slope is known"


def test_odd_steps_change_nothing() -> None:
    """A compilation, a garbage collection: single steps that take a hundred times as long."""
    plans = []
    for odd in (0, 1):

        def cost(index: int, decodes: int, tokens: int, odd: int = odd) -> float:
            seconds = decode_seconds(decodes) + (chunk_seconds(tokens) if tokens else 0)
            return seconds * (100 if odd and index % 23 == 7 else 1)

        engine = paced(cost=cost)
        engine.decode(50)
        engine.run_until_done(engine.ask(8_000, max_tokens=1))
        plans.append([cost.tokens for cost in engine.costs if cost.tokens])
    usual, with_odd = (sorted(plan)[len(plan) // 2] for plan in plans)
    assert abs(with_odd - usual) <= 0.02 * usual
    assert max(with_odd for with_odd in plans[1]) <= 1.1 * max(plans[0])


@pytest.mark.parametrize("depth", [0, 1])
def test_prefill_that_is_dear_whatever_its_size_comes_in_large_chunks_now_and_then(depth: int) -> None:
    """Any prefill makes a step three times as long: chunks that are worth that, and steps twice as long on average."""

    def cost(index: int, decodes: int, tokens: int) -> float:
        return 0.01 + (0.02 + 0.0001 * tokens if tokens else 0)

    engine = paced(depth=depth, cost=cost)
    engine.decode(4)
    costs = engine.run_until_done(engine.ask(16_000, max_tokens=1))[80:]
    assert sum(cost.seconds for cost in costs) / len(costs) < 2 * 0.01
    chunks = sorted(cost.tokens for cost in costs if cost.tokens)
    assert 100 <= chunks[len(chunks) // 2] <= 200, "about as much work as it costs to do any"
    assert max(cost.seconds for cost in costs) < 0.01 + 2.1 * 0.02


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_a_prompt_gets_on_whatever_steps_cost(factor: float) -> None:
    def cost(index: int, decodes: int, tokens: int) -> float:
        return decode_seconds(decodes) + factor * chunk_seconds(tokens) * (tokens > 0)

    engine = paced(cost=cost)
    engine.decode(3)
    costs = engine.run_until_done(engine.ask(500, max_tokens=1))
    gaps, since = [], 0
    for step in costs:
        since += 1
        if step.tokens:
            assert step.tokens >= LEAST_TOKENS or step is costs[-1], "only the end of a prompt is shorter"
            gaps.append(since)
            since = 0
    assert max(gaps) <= MOST_STEPS
    assert factor > 1 or len(costs) < 15


def test_a_batch_of_a_size_that_was_never_seen_is_seen_alone_first() -> None:
    engine = paced(pacer=PrefillPacer(short_prompt=0))
    engine.decode(2)
    for _ in range(20):
        engine.ask(2, max_tokens=10_000)
    engine.step()
    engine.costs.clear()
    engine.ask(3_000, max_tokens=1)
    for _ in range(12):
        engine.step()
    assert [bool(cost.tokens) for cost in engine.costs[:6]] == [False, True, False, True, False, True]
    assert all(cost.tokens for cost in engine.costs[6:])


def test_decodes_are_seen_alone_again_from_time_to_time() -> None:
    engine = paced()
    engine.decode(50)
    engine.run_until_done(engine.ask(15_000, max_tokens=1))
    plain = [i for i, cost in enumerate(engine.costs) if not cost.tokens]
    assert {later - earlier for earlier, later in pairwise(plain)} == {REFRESH_STEPS + 1}


def test_equal_times_give_equal_plans() -> None:
    plans = []
    for _ in range(2):
        engine = paced(depth=1)
        engine.decode(6)
        for length in (700, 90, 4_000):
            engine.ask(length, max_tokens=5)
            engine.step()
        engine.run_until_done("r6", "r7", "r8")
        plans.append([step.chunks for step in engine.steps])
    assert plans[0] == plans[1]


@pytest.mark.parametrize(("budget", "depth"), [(7, 0), (16, 1), (40, 2)])
def test_aborts_and_preemptions_on_a_tiny_pool_with_wild_costs(budget: int, depth: int) -> None:
    rng = random.Random(budget)
    config = make_config(
        max_num_seqs=7, max_num_batched_tokens=budget, num_blocks=14, num_slots=7, prefill_quantum=5, max_model_len=48
    )
    requests = [
        make_request(f"r{i}", rng.choice([1, 2, 4, rng.randint(1, 40)]), max_tokens=rng.randint(1, 10))
        for i in range(300)
    ]
    pacer = PrefillPacer(short_prompt=0)
    engine = PacedEngine(
        config, depth=depth, pacer=pacer, cost=lambda *_: rng.choice([1e-4, 1e-3, 1.0]) * (1 + rng.random())
    )
    drive(engine, requests, rng, abort_share=0.02)
    assert_answers(engine, requests)
    assert_all_back(engine)
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.num_paced_steps > 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([64, 256]))
def test_any_costs_and_any_load_give_the_solo_answers(seed: int, budget: int) -> None:
    rng = random.Random(seed)
    config = make_config(max_num_seqs=6, max_num_batched_tokens=budget, num_blocks=rng.randint(60, 300))
    engine = PacedEngine(config, depth=rng.randint(0, 2), cost=lambda *_: 10 ** rng.uniform(-5, 1))
    requests = [make_request(f"r{i}", rng.randint(1, 150), max_tokens=rng.randint(1, 12)) for i in range(12)]
    drive(engine, requests, rng, abort_share=rng.choice([0.0, 0.05]))
    assert_answers(engine, requests)
    assert_all_back(engine)
