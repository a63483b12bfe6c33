"""The engine against transformers in fp32: log-probabilities of every position, for every way to schedule them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.harness import (
    Harness,
    Part,
    Schedule,
    chunked,
    decoded,
    one_shot,
    oracle_logprobs,
    random_sequences,
)
from tests.tiny_models import VARIANTS, build_oracle, save_checkpoint
from tests.tolerances import PARITY_LOGPROB

LENGTHS = (97, 41, 70)
VOCAB = 136

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "one_shot": lambda: one_shot(LENGTHS),
    "chunks_1": lambda: chunked(LENGTHS, 1),
    "chunks_3": lambda: chunked(LENGTHS, 3),
    "chunks_7": lambda: chunked(LENGTHS, 7),
    "chunks_64": lambda: chunked(LENGTHS, 64),
    "decode_64": lambda: decoded(LENGTHS, 33),
    "mixed": lambda: mixed(),
}


def mixed() -> Schedule:
    """Decodes of the first, chunks of the second, and a late third whose first chunk is one token."""
    steps: list[list[Part]] = [[Part(0, 30)]]
    steps += [[Part(0, 1, True), Part(1, 5)] for _ in range(8)]
    steps += [[Part(0, 1, True), Part(1, 1), Part(2, 1)]]
    steps += [[Part(0, 1, True), Part(2, 2)] for _ in range(20)]
    steps += [[Part(0, 1, True), Part(2, 1)] for _ in range(29)]
    steps += [[Part(0, 1, True)] for _ in range(9)]
    return steps


class Model:
    """An oracle, its checkpoint and its log-probabilities of the test sequences."""

    def __init__(self, name: str, folder: Path) -> None:
        architecture, overrides = VARIANTS[name]
        self.oracle = build_oracle(architecture, 11, **overrides)
        self.folder = save_checkpoint(self.oracle, folder)
        self.sequences = random_sequences(LENGTHS, vocab=VOCAB, seed=5)
        self.expected = [oracle_logprobs(self.oracle, sequence) for sequence in self.sequences]

    def worst(self, got: list[torch.Tensor]) -> float:
        for rows in got:
            assert torch.isfinite(rows).all(), "not finite"
        return max(float((a - b).abs().max()) for a, b in zip(got, self.expected, strict=True))


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_logprobs_equal_transformers(model: Model, schedule: str) -> None:
    harness = Harness(model.folder)
    assert model.worst(harness.run(model.sequences, SCHEDULES[schedule]())) < PARITY_LOGPROB


def test_slots_and_pages_are_reused_clean(model: Model) -> None:
    """What the last owner left in blocks and slots never shows, not even for a prompt of one token."""
    harness = Harness(model.folder, max_num_seqs=3, num_blocks=40, max_model_len=256)
    for seed in range(3):
        harness.run(random_sequences(LENGTHS, vocab=VOCAB, seed=seed), chunked(LENGTHS, 64))
    schedule = [[Part(0, 1), Part(1, 1), Part(2, 1)], *decoded(LENGTHS, 1)[1:]]
    assert model.worst(harness.run(model.sequences, schedule)) < PARITY_LOGPROB
