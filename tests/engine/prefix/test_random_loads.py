"""Random loads on small pools with every setting mixed: whatever is taken over, the answers are those of the model."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sidestream.config.model import ModelConfig
from tests.engine.prefix.serving import VOCAB, Serving
from tests.engine.prefix.test_prompts import Model

REQUESTS = 12


def host_bytes(model: Model, blocks: int, block_size: int) -> int:
    """Of so many blocks of fp32 rows."""
    config = ModelConfig.from_hf(model.folder)
    row = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    layers = sum(layer.attention.value.endswith("mla") for layer in config.layers)
    return blocks * layers * block_size * row * 4


def open_engine(model: Model, rng: random.Random, *, hosted: bool) -> Serving:
    """Blocks as small as an index pool, few or no snapshots, steps of a token up to whole prompts."""
    block_size = rng.choice((4, 8, 16, 64))
    budget = rng.choice((1, 5, 17, 64, 256))
    longest = 200
    settings: dict[str, Any] = {
        "block_size": block_size,
        "max_num_batched_tokens": budget,
        "max_num_seqs": min(budget, rng.choice((1, 3, 5))),
        "max_model_len": longest,
        "num_blocks": -(-longest // block_size) + rng.choice((0, 3, 3 * 64 // block_size)),
        "num_prefix_snapshots": rng.choice((0, 1, 2, 5, 30)),
        "prefix_snapshot_interval": rng.choice((None, None, 1, 3)),
    }
    if hosted:  # room for what a step may write
        settings["num_blocks"] += budget // block_size + 2 * settings["max_num_seqs"]
        settings["hisparse_host_memory"] = host_bytes(model, settings["num_blocks"], block_size)
    serving = Serving(model.folder, recorded=False, **settings)
    cache = serving.core.scheduler._prefixes._cache
    assert cache is not None
    if cache._guesses:
        cache._guesses = [1 << power for power in range(12)]
    return serving


def draw_prompt(rng: random.Random, stems: list[list[int]], answers: list[list[int]]) -> list[int]:
    """A beginning of something that was there before, a running prompt or an answer too, and a tail."""
    stem = rng.choice(stems + answers)
    kept = stem[: rng.choice((len(stem), rng.randrange(1, len(stem) + 1), len(stem) // 16 * 16))]
    tail = [rng.randrange(5, VOCAB) for _ in range(rng.choice((0, 0, 1, 2, 20)))]
    return ([*kept, *tail] or [7])[:150]


def drive(model: Model, seed: int, *, hosted: bool) -> Counter[str]:
    rng = random.Random(seed)
    serving = open_engine(model, rng, hosted=hosted)
    stems = [[rng.randrange(5, VOCAB) for _ in range(rng.randrange(1, 130))] for _ in range(3)]
    answers: list[list[int]] = []
    submitted, aborted = 0, set()
    while submitted < REQUESTS or serving.core.has_work():
        for _ in range(rng.choice((0, 0, 1, 2)) if submitted < REQUESTS else 0):
            prompt = draw_prompt(rng, stems, answers)
            for _ in range(rng.choice((1, 1, 1, 3))):  # the same one three times at once
                submitted += 1
                salt, seen = rng.choice(("", "", "", "x")), rng.random() < 0.1
                params = {"prompt_logprobs": 1} if seen else {}
                serving.add(str(submitted), prompt, max_tokens=rng.randrange(1, 20), salt=salt, **params)
            stems.append(prompt)
        if submitted and rng.random() < 0.03:
            name = str(rng.randrange(1, submitted + 1))
            if serving.core.abort(name):
                aborted.add(name)
        serving.step()
        for served in serving.served.values():
            if served.finish_reason is not None and served.sequence not in answers:
                answers.append(served.sequence)
    for name, served in serving.served.items():
        assert served.finish_reason is not None or name in aborted, f"seed {seed}: request {name} has no end"
        if served.tokens:
            model.check(served)
    scheduler, stats = serving.core.scheduler, serving.core.scheduler.prefix_stats
    scheduler.check_integrity()
    assert scheduler.num_free_blocks == serving.built.num_blocks - 1
    return Counter(
        hits=stats.hits,
        guessed=stats.snapshots_guessed,
        evicted=stats.snapshots_evicted,
        blocks=stats.blocks_evicted,
        preempted=scheduler.num_preemptions,
        waited=stats.waited,
        aborted=len(aborted),
    )


@pytest.mark.parametrize(("name", "hosted"), [("next", False), ("next", True), ("kimi", False), ("dsa", True)])
def test_answers_are_those_of_the_model_whatever_is_taken_over(name: str, hosted: bool, tmp_path: Path) -> None:
    model = Model(name, tmp_path)
    total: Counter[str] = Counter()
    for seed in range(3, 9):
        total += drive(model, seed, hosted=hosted)
    assert total["hits"] > 5
    assert total["aborted"] > 5
    assert (total["guessed"] > 0) == (name != "dsa")
