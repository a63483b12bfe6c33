"""Random loads on tiny pools: every finished answer is its solo run, and everything comes back."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.core.request import FinishReason, Request
from sidestream.scheduler.config import SchedulerConfig
from tests.scheduler.fake_engine import VOCAB, FakeEngine, make_config, make_request, solo_run


def assert_answers(engine: FakeEngine, requests: list[Request]) -> None:
    for request in requests:
        name = request.request_id
        outputs, reason = solo_run(request, engine.config)
        if engine.reasons[name] is FinishReason.ABORT:
            assert engine.outputs[name] == outputs[: len(engine.outputs[name])]
        else:
            assert (engine.outputs[name], engine.reasons[name]) == (outputs, reason)


def assert_all_back(engine: FakeEngine) -> None:
    config = engine.config
    assert engine.scheduler.num_free_blocks == (config.num_blocks - 1 if config.uses_blocks else 0)
    assert engine.scheduler.num_free_slots == (config.num_slots - 1 if config.uses_slots else 0)
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0
    engine.scheduler.check_integrity()


def drive(engine: FakeEngine, requests: list[Request], rng: random.Random, *, abort_share: float) -> None:
    """Feed the requests in bursts, abort some at random moments, run to the end."""
    queue = list(reversed(requests))
    live: list[str] = []
    while queue or engine.scheduler.has_work():
        for _ in range(rng.choice([0, 0, 1, 3])):
            if queue:
                request = queue.pop()
                engine.add(request)
                live.append(request.request_id)
        if live and rng.random() < abort_share:
            engine.abort(rng.choice(live))
        engine.step()
        live = [name for name in live if name not in engine.reasons]


@pytest.mark.parametrize(("budget", "depth"), [(1, 0), (3, 1), (7, 0), (16, 1), (40, 2), (64, 1)])
def test_a_thousand_requests_with_aborts_on_a_tiny_pool(budget: int, depth: int) -> None:
    rng = random.Random(budget)
    config = make_config(
        max_num_seqs=7, max_num_batched_tokens=budget, num_blocks=14, num_slots=7, prefill_quantum=5, max_model_len=48
    )
    requests = [
        make_request(
            f"r{i}",
            rng.choice([1, 2, 4, rng.randint(1, 40)]),
            max_tokens=rng.randint(1, 10),
            stop=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 3]))),
            min_tokens=rng.choice([0, 0, 2]),
        )
        for i in range(1_000 if budget == 16 else 150)
    ]
    engine = FakeEngine(config, depth=depth)
    drive(engine, requests, rng, abort_share=0.02)
    assert_answers(engine, requests)
    assert_all_back(engine)
    reasons = set(engine.reasons.values())
    assert reasons == set(FinishReason)
    assert budget < 7 or engine.scheduler.num_preemptions > 0, "the load never ran out of blocks"


configs = st.builds(
    lambda seqs, budget, size, blocks, slots, quantum, watermark, uses: make_config(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        block_size=size,
        num_blocks=blocks,
        num_slots=slots,
        prefill_quantum=quantum,
        watermark=watermark,
        uses_blocks=uses[0],
        uses_slots=uses[1],
        max_model_len=30,
    ),
    st.integers(1, 6),
    st.integers(1, 64),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(2, 20),
    st.integers(2, 6),
    st.sampled_from([1, 3, 64]),
    st.sampled_from([0.0, 0.01, 0.4]),
    st.sampled_from([(True, True), (True, True), (True, False), (False, True), (False, False)]),
)


@settings(max_examples=150, deadline=None)
@given(configs, st.integers(0, 3), st.integers(0, 2**32))
def test_any_limits_and_any_load_give_the_solo_answers(config: SchedulerConfig, depth: int, seed: int) -> None:
    rng = random.Random(seed)
    longest = min(29, config.pool_tokens or 29)
    requests = [
        make_request(
            f"r{i}",
            rng.randint(1, longest),
            max_tokens=rng.randint(1, 12),
            stop=tuple(rng.sample(range(VOCAB), 2)),
            min_tokens=rng.choice([0, 0, 3]),
        )
        for i in range(12)
    ]
    engine = FakeEngine(config, depth=depth)
    drive(engine, requests, rng, abort_share=rng.choice([0.0, 0.05]))
    assert_answers(engine, requests)
    assert_all_back(engine)
    known = [name for step in engine.steps for name in step.preempted]
    untold = engine.scheduler._running.num_preempted  # those that ended before another step was planned
    told = len(known) + untold
    assert told == engine.scheduler.num_preemptions, "each preemption is told to the engine once"


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_the_pipelined_engine_gives_the_tokens_of_the_synchronous_one(seed: int) -> None:
    answers = []
    for depth in (0, 1):
        rng = random.Random(seed)
        config = make_config(max_num_seqs=5, num_blocks=rng.randint(9, 20), max_num_batched_tokens=rng.randint(1, 32))
        engine = FakeEngine(config, depth=depth)
        for i in range(10):
            stop = tuple(rng.sample(range(VOCAB), 2))
            engine.add(make_request(f"r{i}", rng.randint(1, 25), max_tokens=rng.randint(1, 8), stop=stop))
        engine.run()
        answers.append((engine.outputs, engine.reasons))
        assert_all_back(engine)
    assert answers[0] == answers[1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([8, 16, 64]))
def test_a_first_token_comes_after_a_bounded_number_of_steps(seed: int, budget: int) -> None:
    """With seats and memory for all, a short request waits for turns, not for the length of anyone's prompt."""
    rng = random.Random(seed)
    config = make_config(
        max_num_seqs=7, num_slots=9, max_num_batched_tokens=budget, num_blocks=4_000, max_model_len=4_000
    )
    engine = FakeEngine(config)
    for i in range(rng.randint(1, 6)):
        engine.add(make_request(f"long {i}", rng.randint(1_000, 2_000), max_tokens=1))
        for _ in range(rng.randint(0, 5)):
            engine.step()
    engine.add(make_request("short", 8, max_tokens=1))
    steps = 0
    while "short" not in engine.reasons:
        engine.step()
        steps += 1
    chunks = -(-8 // config.prefill_quantum)
    turn = -(-7 * config.prefill_quantum // (budget - budget % config.prefill_quantum))
    assert steps <= chunks * turn + 1
