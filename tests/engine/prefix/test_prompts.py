"""Every way for a prompt to meet a cached one: what it takes over, and that nothing else changes.

Log-probabilities of every computed position are those of transformers, and those of an engine without a prefix cache
that runs the same chunks, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.core.outputs import CacheReason
from tests.engine.harness import oracle_logprobs, random_sequences
from tests.engine.llm_fixtures import MARGIN
from tests.engine.prefix.serving import BLOCK, VOCAB, Replay, Served, Serving
from tests.tiny_models import VARIANTS, build_oracle, save_checkpoint
from tests.tolerances import PARITY_LOGPROB

P, SUFFIX, OTHER, THIRD = random_sequences((130, 20, 30, 30), vocab=VOCAB, seed=5)
HYBRID = ("next", "kimi")


class Model:
    def __init__(self, name: str, folder: Path) -> None:
        architecture, overrides = VARIANTS[name]
        self.name = name
        self.oracle = build_oracle(architecture, 11, **overrides)
        self.folder = save_checkpoint(self.oracle, folder)

    def check(self, served: Served) -> None:
        """Against transformers: every position that the request computed, every token that it chose."""
        expected = oracle_logprobs(self.oracle, served.sequence)
        chosen = expected[len(served.prompt) - 1 : -1]
        behind = chosen.amax(-1) - chosen.gather(-1, torch.tensor(served.tokens, dtype=torch.int64)[:, None])[:, 0]
        assert float(behind.max()) <= MARGIN, f"tokens are behind the best by {behind.tolist()}"
        for position, row in served.rows.items():
            gap = float((row - expected[position]).abs().max())
            assert gap < PARITY_LOGPROB, f"position {position} of {len(expected)}: {gap}"


@pytest.fixture(scope="module", params=["next", "kimi", "dsa", "deepseek"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


def check_bits(uncached: Replay, served: Served) -> None:
    """Against the engine without a cache at the same schedule."""
    expected = uncached.rows(served.recipe)
    assert set(served.rows) == set(range(served.cached_tokens, len(served.sequence) - 1))
    for position, row in served.rows.items():
        assert torch.equal(row, expected[position]), f"position {position}"


@pytest.mark.parametrize("chunk", [1, 3, 7, 64, 256])
def test_each_prompt_takes_over_what_it_can(model: Model, chunk: int) -> None:
    settings: dict[str, Any] = {"max_num_batched_tokens": chunk, "max_num_seqs": min(chunk, 4)}
    serving = Serving(model.folder, **settings)
    uncached = Replay(model.folder)
    hybrid = model.name in HYBRID
    whole, none = CacheReason.NOTHING_LONGER, CacheReason.NO_SNAPSHOT
    cases: list[
        tuple[list[int], int, int, CacheReason]
    ] = [  # prompt, tokens taken over by a model without linear attention, by one with it, and why not more
        (P, 0, 0, whole),
        ([*P, *SUFFIX], 128, 128, whole),
        ([*P[:100], *OTHER], 96, 0, none),  # its state was wanted by nobody before; now there is a snapshot at 96
        ([*P[:100], *THIRD], 96, 96, whole),
        (P, 128, 128, whole),
        (P[:63], 48, 0, none),
        (P[:65], 64, 48, none),
        ([*P[:66], 9], 64, 64, whole),
        (P[:64], 48, 48, CacheReason.LAST_TOKEN),
        (P[:15], 0, 0, CacheReason.SHORT),
    ]
    for number, (prompt, dense, linear, reason) in enumerate(cases):
        served = serving.serve(f"r{number}", prompt, max_tokens=2)
        assert served.cached_tokens == (linear if hybrid else dense), number
        if hybrid or reason is not none:
            assert served.reason is reason, number
        model.check(served)
        check_bits(uncached, served)
    stats = serving.core.scheduler.prefix_stats
    assert stats.cached_tokens == sum(case[2 if hybrid else 1] for case in cases)
    assert stats.snapshots_restored == (6 if hybrid else 0)
    if hybrid:
        assert stats.unused_tokens[none] == 96 + 48 + 16
    assert stats.unused_tokens[CacheReason.LAST_TOKEN] == BLOCK
