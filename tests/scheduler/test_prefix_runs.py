"""The scheduler with a prefix cache: random loads that share, and what it waits for and where it stops for others."""

from __future__ import annotations

import random

import pytest

from sidestream.cache import block_hashes
from sidestream.cache.block_hashes import hash_block
from sidestream.cache.block_pool import BlockPool
from sidestream.cache.prefix_tree import PrefixNode, PrefixTree
from sidestream.core.request import Request
from sidestream.scheduler.scheduler import Scheduler
from tests.scheduler.fake_engine import VOCAB, FakeEngine, make_config, make_request, solo_run
from tests.scheduler.test_random_runs import assert_all_back, assert_answers, drive


def caching(**overrides: object) -> FakeEngine:
    return FakeEngine(
        make_config(**({"prefix_caching": True, "needs_snapshots": True, "num_snapshots": 8} | overrides))
    )


def sharing_requests(rng: random.Random, count: int) -> list[Request]:
    stems = [tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))) for _ in range(4)]
    requests = []
    for i in range(count):
        stem = rng.choice(stems)
        prompt = stem[: rng.randint(1, len(stem))] + tuple(
            rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 1, 9)))
        )
        stop = tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 3))))
        requests.append(make_request(f"r{i}", prompt, max_tokens=rng.randint(1, 10), stop=stop))
    return requests


@pytest.mark.parametrize("hybrid", [True, False])
def test_random_loads_that_share_get_their_own_answers(hybrid: bool) -> None:
    """The fake device reads history through blocks and slots only, so a wrong block or snapshot changes the answer."""
    hits = restored = preemptions = waited = evicted = 0
    for seed in range(120):
        rng = random.Random(seed)
        config = make_config(
            max_num_seqs=rng.randint(1, 6),
            max_num_batched_tokens=rng.choice((1, 3, 7, 16, 40)),
            num_blocks=rng.randint(14, 60),
            num_slots=7,
            uses_slots=hybrid,
            prefill_quantum=5,
            max_model_len=48,
            prefix_caching=True,
            needs_snapshots=hybrid,
            num_snapshots=rng.randint(0, 8),
            snapshot_interval=rng.choice((None, None, 1, 3)),
            first_guess=rng.choice((4, 8, 128)),
            shared_prefix_wait=rng.choice((0, 2, 200)),
        )
        requests = sharing_requests(rng, 30)
        engine = FakeEngine(config, depth=rng.choice((0, 1, 2)))
        drive(engine, requests, rng, abort_share=rng.choice((0.0, 0.03)))
        assert_answers(engine, requests)
        assert_all_back(engine)
        stats = engine.scheduler.prefix_stats
        hits += stats.hits
        restored += stats.snapshots_restored
        waited += stats.waited
        evicted += stats.blocks_evicted
        preemptions += engine.scheduler.num_preemptions
    assert hits > 500
    assert waited > 20
    assert evicted > 1_000
    assert preemptions > 20
    assert restored == (hits if hybrid else 0), "never one part without the other"


def chunks_of(engine: FakeEngine) -> list[tuple[int, int, list[int]]]:
    """Start, length and the places of states within, of each chunk."""
    chunks = [chunk for step in engine.steps for chunk in step.chunks]
    return [(chunk.start, chunk.length, [split.position for split in chunk.splits]) for chunk in chunks]


@pytest.mark.parametrize("prompt", [22, 86])
@pytest.mark.parametrize("hybrid", [True, False])
def test_what_the_cache_does_before_a_step_is_launched_does_not_grow_with_its_prompt(
    hybrid: bool, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that shares nothing, in a full pool: it is hashed as far as one block, enters the tree with that, and
    none of the blocks that it takes is forgotten; all that comes with ``remember``."""
    engine = caching(
        needs_snapshots=hybrid, num_blocks=61, num_snapshots=4, max_num_batched_tokens=200, max_model_len=230
    )
    rng, scheduler, work = random.Random(1), engine.scheduler, list[str]()
    while not scheduler.prefix_stats.blocks_evicted:
        engine.add(make_request(f"before {rng.random()}", tuple(rng.randrange(VOCAB) for _ in range(20)), max_tokens=1))
        engine.run()

    def counted(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: object) -> object:
            work.append(name)
            return real(*args)

        monkeypatch.setattr(owner, name, call)

    counted(PrefixNode, "__init__")
    counted(PrefixTree, "prune")
    counted(BlockPool, "_forget")
    monkeypatch.setattr(block_hashes, "hash_block", lambda content: work.append("hash") or hash_block(content))
    engine.add(make_request("new", tuple(i * i % VOCAB for i in range(prompt)), max_tokens=1))
    assert work == ["hash", "__init__"]
    assert scheduler.schedule() is not None
    assert work == ["hash", "__init__"]
    scheduler.remember()
    blocks = prompt // 4
    assert work.count("hash") == work.count("__init__") == blocks
    assert blocks - 1 <= work.count("_forget") <= blocks + 1
    assert work.count("prune") == work.count("_forget")
    scheduler.check_integrity()


def test_a_chunk_leaves_states_on_its_way() -> None:
    """No chunk more than without a cache, so no step more either."""
    engine = caching(max_num_batched_tokens=40)
    engine.add(make_request("a", 30, max_tokens=1))
    engine.run()
    assert chunks_of(engine) == [(0, 30, [28])]
    engine = caching(max_num_batched_tokens=40, snapshot_interval=3)
    engine.add(make_request("a", 30, max_tokens=1))
    engine.run()
    assert chunks_of(engine) == [(0, 30, [12, 24, 28])]
    engine = caching(max_num_batched_tokens=40, first_guess=5)
    engine.add(make_request("a", 30, max_tokens=1))
    engine.run()
    assert chunks_of(engine) == [(0, 30, [8, 16, 28])]
    engine = caching(max_num_batched_tokens=24)
    engine.add(make_request("a", 24, max_tokens=1))
    engine.run()
    assert chunks_of(engine) == [(0, 24, [])]
    assert [len(step.snapshots) for step in engine.steps] == [1], "at a chunk's end a copy of the slot does"


def test_no_chunk_ends_for_the_states_that_it_leaves() -> None:
    engine = caching(max_num_batched_tokens=100, snapshot_interval=1, num_snapshots=30)
    engine.add(make_request("a", 70, max_tokens=1))
    engine.run()
    assert chunks_of(engine) == [(0, 70, list(range(4, 69, 4)))]
    assert engine.scheduler.prefix_stats.snapshots_taken == 17


@pytest.mark.parametrize("tail", [1, 4, 5, 60])
def test_the_first_follower_hits_though_the_first_prompt_has_ended(tail: int) -> None:
    """Nobody could know where they would part. More than half of what they share is taken over, all of it by the
    third: the second leaves the state where they part."""
    for shared in range(8, 70, 4):
        engine = caching(max_num_batched_tokens=40, first_guess=8, num_snapshots=16, num_blocks=200)
        stem = tuple(range(10, 10 + shared))
        for name in "abc":
            engine.add(make_request(name, (*stem, *([ord(name) % 7] * tail)), max_tokens=1))
            engine.run()
        whole = shared // 4 * 4
        assert engine.cached["b"] * 2 > whole
        assert engine.cached["c"] == whole


@pytest.mark.parametrize("between", ["nothing", "remember", "schedule", "commit", "abort"])
def test_a_follower_hits_whatever_came_between(between: str) -> None:
    """A planned step is entered by ``remember``, or by the next that is asked of the scheduler."""
    scheduler = Scheduler(
        make_config(prefix_caching=True, needs_snapshots=True, num_snapshots=8, max_num_batched_tokens=50)
    )
    stem = tuple(range(40))
    scheduler.add(make_request("a", (*stem, 1, 2), max_tokens=2))
    step = scheduler.schedule()
    assert step is not None
    prefix = scheduler._sequences["a"].prefix
    assert prefix is not None
    assert len(prefix.hashes.hashes) == len(prefix.path) == 1, "the step can be launched before the rest is hashed"
    assert [split.position for chunk in step.chunks for split in chunk.splits] == [40]
    if between == "remember":
        scheduler.remember()
    elif between == "schedule":
        assert scheduler.schedule() is not None
    elif between == "commit":
        scheduler.commit(step, {"a": 3})
    elif between == "abort":
        assert scheduler.abort("a")
    scheduler.add(make_request("b", (*stem, 5), max_tokens=1))
    following = scheduler.schedule()
    assert following is not None
    assert [admission.cached_tokens for admission in following.admitted] == [40]
    scheduler.check_integrity()


def test_without_linear_attention_no_chunk_ends_early() -> None:
    engine = caching(max_num_batched_tokens=40, needs_snapshots=False, uses_slots=False)
    engine.add(make_request("a", 30, max_tokens=1))
    engine.run()
    engine.add(make_request("b", 30, max_tokens=1))
    assert [c.length for step in engine.steps for c in step.chunks] == [30]


def test_waiting_for_a_prefix_in_flight_is_bounded() -> None:
    stem = tuple(range(40))
    for bound, starts in ((2, 3), (0, 2), (200, 10)):  # without waiting it is the other's turn first
        engine = caching(max_num_batched_tokens=4, num_blocks=60, shared_prefix_wait=bound)
        engine.add(make_request("a", (*stem, 1, 2, 3), max_tokens=1))
        engine.step()
        engine.add(make_request("b", (*stem, 7, 8, 9), max_tokens=1))
        steps = 1
        while not any(c.request_id == "b" for c in engine.steps[-1].chunks):
            engine.step()
            steps += 1
        assert steps - 1 == starts, f"bound {bound}"
        assert engine.scheduler.prefix_stats.gave_up == (bound < 10)
        engine.run()
        assert engine.cached["b"] == (40 if bound == 200 else 0)
        assert engine.outputs["b"] == solo_run(make_request("b", (*stem, 7, 8, 9), max_tokens=1), engine.config)[0]


def test_a_request_behind_one_that_waits_is_served() -> None:
    stem = tuple(range(40))
    engine = caching(max_num_batched_tokens=8, num_blocks=60)
    for name, prompt in (("a", (*stem, 1)), ("b", (*stem, 2)), ("c", (5, 6, 7))):
        engine.add(make_request(name, prompt, max_tokens=1))
    engine.step()
    assert {c.request_id for c in engine.steps[0].chunks} == {"a", "c"}
    engine.run()
    assert engine.cached == {"a": 0, "b": 40, "c": 0}


def test_generated_tokens_are_found_by_the_next_turn_and_hold_one_snapshot_at_a_time() -> None:
    engine = caching(num_snapshots=3)
    first = make_request("first", 10, max_tokens=30)
    engine.add(first)
    engine.run()
    stats = engine.scheduler.prefix_stats
    assert stats.snapshots_taken == 1 + 7, "at 8, then at 12, 16, .. 36"
    assert stats.snapshots_evicted == 0
    history = (*first.prompt_token_ids, *engine.outputs["first"])
    engine.add(make_request("second", (*history, 1, 2), max_tokens=2))
    engine.run()
    assert engine.cached["second"] == 36, "40 tokens, of which the last was never computed"
