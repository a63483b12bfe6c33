"""States can take tokens back: decodes of 1 + n tokens whose last ones were wrong leave no trace."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.engine.harness import Harness, Part, oracle_logprobs, random_sequences
from tests.tiny_models import VARIANTS, build_oracle, save_checkpoint
from tests.tolerances import PARITY_LOGPROB

LENGTHS = (80, 77)


@pytest.mark.parametrize("variant", ["next", "next_share", "dsa", "kimi"])
@pytest.mark.parametrize("extra", [1, 3])
def test_rejected_tokens_leave_no_trace(variant: str, extra: int, tmp_path: Path) -> None:
    architecture, overrides = VARIANTS[variant]
    oracle = build_oracle(architecture, 13, **overrides)
    folder = save_checkpoint(oracle, tmp_path)
    sequences = random_sequences(LENGTHS, vocab=136, seed=4)
    rng = random.Random(extra)
    schedule = [[Part(0, 21), Part(1, 18)]]
    done = [21, 18]
    while any(at < length for at, length in zip(done, LENGTHS, strict=True)):
        step = []
        for i, length in enumerate(LENGTHS):
            if done[i] < length:
                kept = min(rng.randrange(1, 2 + extra), length - done[i])
                step.append(Part(i, 1 + extra, is_decode=True, take_back=1 + extra - kept))
                done[i] += kept
        schedule.append(step)
    assert any(part.take_back for step in schedule for part in step)
    got = Harness(folder, rollback=extra).run(sequences, schedule)
    for rows, sequence in zip(got, sequences, strict=True):
        assert float((rows - oracle_logprobs(oracle, sequence)).abs().max()) < PARITY_LOGPROB
