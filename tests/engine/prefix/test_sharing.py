"""Sharing between requests that run together, and what becomes of it when memory runs out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sidestream import LLM, SamplingParams
from sidestream.core.outputs import CacheReason
from sidestream.errors import RequestError
from tests.engine.harness import random_sequences
from tests.engine.prefix.serving import BLOCK, VOCAB, Replay, Serving
from tests.engine.prefix.test_prompts import HYBRID, Model, check_bits

STEM, ONE, TWO, THREE, ELSE = random_sequences((128, 40, 40, 40, 130), vocab=VOCAB, seed=6)


@pytest.fixture(scope="module", params=["next", "kimi", "dsa", "deepseek"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


def test_prompts_that_part_are_computed_once_though_they_come_at_once(model: Model) -> None:
    """From the first follower on, with tails of more than a block: the tree knows that they part before either ran."""
    serving = Serving(model.folder, max_num_batched_tokens=64)
    tails = (ONE, TWO, THREE)
    served = [serving.add(f"r{i}", [*STEM, *tail]) for i, tail in enumerate(tails)]
    serving.run()
    assert [one.cached_tokens for one in served] == [0, 128, 128]
    for one in served:
        model.check(one)
    stats = serving.core.scheduler.prefix_stats
    assert stats.waited == 2
    assert stats.gave_up == 0
    assert stats.wait_steps >= 2


def test_a_prompt_is_hashed_behind_the_launch_of_its_step(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """And before its token is read, so that the host does it while the device is at work."""
    serving = Serving(model.folder, recorded=False)
    serving.add("alone", STEM)
    prefix = serving.core.scheduler._sequences["alone"].prefix
    assert prefix is not None
    hashed = []

    def noting(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def noted(*args: Any, **kw: Any) -> Any:
            hashed.append((name, len(prefix.hashes.hashes)))
            return real(*args, **kw)

        monkeypatch.setattr(owner, name, noted)

    noting(serving.built.runner, "forward")
    noting(serving.core.scheduler, "commit")
    serving.step()
    assert hashed == [("forward", 1), ("commit", len(STEM) // BLOCK)]


def test_a_prompt_that_shares_nothing_passes_those_that_wait(model: Model) -> None:
    serving = Serving(model.folder, max_num_batched_tokens=16)
    serving.add("first", [*STEM, *ONE])
    waiting = serving.add("waits", [*STEM, *TWO])
    passing = serving.add("passes", ELSE[:20], max_tokens=1)
    while not passing.tokens:
        serving.step()
    assert not waiting.rows, "it began before the prefix that it shares was there"
    serving.run()
    assert waiting.cached_tokens == 128
    model.check(waiting)


def test_waiting_ends_when_the_other_is_aborted(model: Model) -> None:
    serving = Serving(model.folder, max_num_batched_tokens=16)
    serving.add("first", [*STEM, *ONE])
    waiting = serving.add("waits", [*STEM, *TWO])
    for _ in range(5):
        serving.step()
    assert not waiting.rows
    assert serving.core.abort("first")
    serving.run()
    assert waiting.cached_tokens == (0 if model.name in HYBRID else 80), "what was computed until then is kept"
    model.check(waiting)


def test_completions_of_one_prompt_share_it(model: Model) -> None:
    serving = Serving(model.folder)
    served = [serving.add(f"r{i}", [*STEM, *ONE]) for i in range(4)]
    serving.run()
    assert [one.cached_tokens for one in served] == [0, 160, 160, 160]
    assert len({tuple(one.tokens) for one in served}) == 1


def test_salts_keep_prompts_apart(model: Model) -> None:
    serving = Serving(model.folder)
    for salt, expected in (("", 0), ("a", 0), ("b", 0), ("a", 128), ("", 128)):
        served = serving.serve(f"{salt} {expected}", [*STEM, *ONE[:5]], salt=salt)
        assert served.cached_tokens == expected, salt
        model.check(served)


def test_prompt_logprobs_pass_by_the_cache(model: Model) -> None:
    serving = Serving(model.folder)
    serving.serve("first", STEM)
    served = serving.serve("second", STEM, prompt_logprobs=1)
    assert (served.cached_tokens, served.reason) == (0, CacheReason.PROMPT_LOGPROBS)
    assert set(served.rows) >= set(range(len(STEM)))
    assert serving.core.scheduler.prefix_stats.unused_tokens[CacheReason.PROMPT_LOGPROBS] == 128
    model.check(served)


def test_a_snapshot_is_evicted_while_its_blocks_stay(model: Model) -> None:
    serving = Serving(model.folder, num_prefix_snapshots=1)
    uncached = Replay(model.folder)
    serving.serve("first", [*STEM, 9], max_tokens=1)
    serving.serve("other", ELSE, max_tokens=1)
    served = serving.serve("again", [*STEM, 10, 11], max_tokens=2)
    if model.name in HYBRID:
        assert (served.cached_tokens, served.reason) == (0, CacheReason.NO_SNAPSHOT)
    else:
        assert served.cached_tokens == 128
    model.check(served)
    check_bits(uncached, served)
    once_more = serving.serve("once more", [*STEM, 12], max_tokens=1)
    assert once_more.cached_tokens == 128
    model.check(once_more)
    check_bits(uncached, once_more)


def test_blocks_are_evicted_with_the_snapshot_behind_them(model: Model) -> None:
    serving = Serving(model.folder, num_blocks=12)
    serving.serve("first", [*STEM, 9], max_tokens=1)
    serving.serve("other", ELSE, max_tokens=1)
    served = serving.serve("again", [*STEM, 10, 11], max_tokens=2)
    assert served.cached_tokens < 128
    assert model.name not in HYBRID or served.cached_tokens == 0
    assert serving.core.scheduler.prefix_stats.blocks_evicted > 0
    model.check(served)


def test_preempted_requests_take_over_what_they_had(model: Model) -> None:
    """With half the blocks that they need, all finish with their own tokens; what was evicted is computed anew."""
    serving = Serving(model.folder, num_blocks=21, max_num_batched_tokens=48, max_num_seqs=4)
    served = [serving.add(f"r{i}", [*STEM[:50], *tail[:20]], max_tokens=60) for i, tail in enumerate((ONE, TWO, THREE))]
    served.append(serving.add("else", ELSE[:40], max_tokens=60))
    serving.run()
    scheduler = serving.core.scheduler
    assert scheduler.num_preemptions > 0
    assert scheduler.prefix_stats.requests == 4 + scheduler.num_preemptions
    for one in served:
        assert len(one.tokens) == 60
        model.check(one)
    assert scheduler.num_free_blocks == 21


def test_slots_and_blocks_used_again_hold_nothing_of_the_last_owner(model: Model) -> None:
    """One slot: what it is given is either zero, by a first chunk, or the snapshot."""
    serving = Serving(model.folder, max_num_seqs=1, num_blocks=24)
    uncached = Replay(model.folder)
    rng = random.Random(3)
    for turn in range(12):
        stem = (STEM, ELSE)[turn % 2]
        prompt = stem[: rng.choice((1, 16, 17, 64, 65, 128))] + [9 + turn] * rng.randrange(3)
        served = serving.serve(f"r{turn}", prompt, max_tokens=2)
        model.check(served)
        check_bits(uncached, served)
    assert serving.core.scheduler.prefix_stats.hits > 0


def cached_bytes(serving: Serving, blocks: list[int], slots: list[int]) -> Iterator[torch.Tensor]:
    """A copy of everything in these blocks and slots, as bytes."""
    pools = serving.built.pools
    for kv in pools.kv.values():
        yield kv.view(-1, BLOCK, kv.shape[1])[blocks].clone().view(torch.uint8)
    for keys in pools.index_keys.values():
        yield keys[blocks].clone().view(torch.uint8)
    for state in pools._states:
        yield state[:, slots].clone().view(torch.uint8)


@pytest.mark.parametrize("suffix", [1, 2])
def test_what_is_cached_stays_bit_for_bit(model: Model, suffix: int) -> None:
    """Users with suffixes of one and two tokens, and their decodes, write to blocks and slots of their own."""
    serving = Serving(model.folder)
    serving.serve("first", STEM, max_tokens=1)
    cache = serving.core.scheduler._prefixes._cache
    assert cache is not None
    nodes = [node for node in cache.tree.nodes.values() if node.block is not None]
    blocks = [node.block for node in nodes if node.block is not None]
    slots = [node.snapshot for node in nodes if node.snapshot is not None]
    assert len(blocks) == 8
    assert len(slots) == (1 if model.name in HYBRID else 0)
    before = list(cached_bytes(serving, blocks, slots))
    served = [serving.add(f"r{i}", [*STEM, *ONE[i : i + suffix]], max_tokens=6) for i in range(3)]
    serving.run()
    assert [one.cached_tokens for one in served] == [128] * 3
    for one in served:
        model.check(one)
    for old, now in zip(before, cached_bytes(serving, blocks, slots), strict=True):
        assert torch.equal(old, now)


@pytest.mark.parametrize("budget", [48, 256])
def test_a_shared_prefix_with_long_tails_hits_from_the_first_follower_on(model: Model, budget: int) -> None:
    """One after the other: nobody could know that prompts would part behind the stem, so it was guessed."""
    serving = Serving(model.folder, max_num_batched_tokens=budget)
    uncached = Replay(model.folder)
    for i, tail in enumerate((ONE, TWO, THREE)):
        served = serving.serve(f"r{i}", [*STEM, *tail])
        assert served.cached_tokens == (128 if i else 0)
        model.check(served)
        check_bits(uncached, served)
    assert serving.core.scheduler.prefix_stats.snapshots_guessed == (1 if model.name in HYBRID else 0)


def test_the_first_follower_takes_over_more_than_half(model: Model) -> None:
    """The second is given all of it, for the first follower left the state where prompts part."""
    serving = Serving(model.folder)
    uncached = Replay(model.folder)
    stem = [*STEM, *ELSE[:100]]
    for i, (tail, linear) in enumerate(((ONE, 0), (TWO, 128), (THREE, 224))):
        served = serving.serve(f"r{i}", [*stem, *tail])
        assert served.cached_tokens == (linear if model.name in HYBRID else 224 if i else 0)
        model.check(served)
        check_bits(uncached, served)


def test_without_a_cache_nothing_is_taken_over(model: Model) -> None:
    serving = Serving(model.folder, enable_prefix_caching=False)
    for name in "ab":
        served = serving.serve(name, STEM)
        assert (served.cached_tokens, served.reason) == (0, CacheReason.DISABLED)
    assert serving.core.scheduler.prefix_stats.requests == 0


@pytest.mark.parametrize("salt", [0, False, [], {}, 1, "\ud800", "a\nb"])
def test_a_salt_that_is_no_text_is_refused_and_leaves_nothing(salt: object) -> None:
    """What counts as no salt would share with everybody."""
    llm = LLM(max_num_seqs=2, num_blocks=12, max_model_len=256)
    with pytest.raises(RequestError, match="cache_salt must be printable text"):
        llm.generate({"prompt_token_ids": [5, 6, 7], "cache_salt": salt}, SamplingParams(max_tokens=1))
    (answer,) = llm.generate({"prompt_token_ids": [5, 6, 7], "cache_salt": None}, SamplingParams(max_tokens=1))
    assert len(answer.outputs[0].token_ids) == 1
