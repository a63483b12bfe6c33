"""A thousand random requests with aborts and preemptions: nothing leaks, and every finished answer is its solo run's.

Solo run in the sense of the first promise: run alone, whole, the model chooses the same tokens, up to margins under
the bound. Each finished sequence is checked in one pass over its tokens.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from sidestream.config.engine import EngineConfig
from sidestream.core.batch import Chunk
from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.build import BuiltEngine, build_engine
from sidestream.engine.core import EngineCore
from tests.engine.llm_fixtures import MARGIN, make_checkpoint

BLOCK = 8
VOCAB = 136


def make_request(name: str, rng: random.Random, *, longest: int) -> Request:
    prompt = [rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 2, 3, 5, rng.randrange(1, longest))))]
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(temperature=0),
        seed=0,
        max_tokens=rng.randrange(1, 20),
        stop_token_ids=frozenset({rng.randrange(VOCAB)}),
        mask_token_ids=(),
    )


def solo_gaps(solo: BuiltEngine, tokens: list[int], prompt: int) -> torch.Tensor:
    """How far each generated token is behind the solo run's best, in nats."""
    blocks = tuple(range(1, 1 + -(-len(tokens) // BLOCK)))
    hidden = solo.runner.forward([Chunk("solo", 0, len(tokens), blocks, 1, False, False)], tokens)
    rows = solo.runner.logits(hidden, range(prompt - 1, len(tokens) - 1)).log_softmax(-1)
    chosen = rows.gather(-1, torch.tensor(tokens[prompt:])[:, None])[:, 0]
    return rows.amax(-1) - chosen


@pytest.mark.parametrize(("variant", "requests"), [("kimi", 600), ("next_share", 250), ("dsa", 150)])
def test_random_requests_finish_as_if_alone(variant: str, requests: int, tmp_path: Path) -> None:
    make_checkpoint(variant, tmp_path)
    rng = random.Random(variant)
    config = EngineConfig(
        block_size=BLOCK, num_blocks=40, max_num_seqs=12, max_num_batched_tokens=48, max_model_len=96, device="cpu"
    )
    built = build_engine(tmp_path, config)
    built.pools.poison()
    core = EngineCore(built)
    start = core.scheduler.num_free_blocks, core.scheduler.num_free_slots
    waiting = [make_request(f"r{i}", rng, longest=70) for i in range(requests)]
    sent: dict[str, Request] = {}
    made: dict[str, list[int]] = {}
    finished: set[str] = set()
    aborted: set[str] = set()
    while waiting or core.has_work():
        for _ in range(rng.choice((0, 0, 1, 2, 5))):
            if waiting:
                request = waiting.pop()
                sent[request.request_id], made[request.request_id] = request, []
                core.add(request)
        if rng.random() < 0.08:
            running = sorted(set(sent) - finished - aborted)
            if running:
                victim = rng.choice(running)
                assert core.abort(victim)
                aborted.add(victim)
        for output in core.step():
            assert output.token_id is not None
            assert output.request_id not in aborted
            made[output.request_id].append(output.token_id)
            if output.finish_reason is not None:
                finished.add(output.request_id)
        core.scheduler.check_integrity()
    assert finished | aborted == set(sent)
    assert len(sent) == requests
    assert aborted
    assert core.scheduler.num_preemptions > 0
    assert (core.scheduler.num_free_blocks, core.scheduler.num_free_slots) == start

    solo = build_engine(
        tmp_path, EngineConfig(block_size=BLOCK, max_num_seqs=1, num_blocks=12, max_num_batched_tokens=96)
    )
    solo.pools.poison()
    for name in sorted(finished):
        prompt = sent[name].prompt_token_ids
        gaps = solo_gaps(solo, [*prompt, *made[name]], len(prompt))
        assert float(gaps.max()) <= MARGIN, f"{name}: {gaps.tolist()}"
