"""Every capture mode on the simulated device: the same bits as without graphs, and the oracle's log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sidestream.core.cudagraph_mode import CUDAGraphMode
from tests.engine.harness import oracle_logprobs, random_sequences
from tests.engine.sim.harness import (
    LENGTHS,
    MODELS,
    SETTINGS,
    VOCAB,
    SimHarness,
    every_kind_of_step,
    make_model,
)
from tests.tolerances import PARITY_LOGPROB

STEPS = {
    "none": {CUDAGraphMode.NONE: 11},
    "piecewise": {CUDAGraphMode.NONE: 1, CUDAGraphMode.PIECEWISE: 10},
    "full": {CUDAGraphMode.NONE: 4, CUDAGraphMode.FULL: 7},
    "full_and_piecewise": {CUDAGraphMode.NONE: 1, CUDAGraphMode.PIECEWISE: 3, CUDAGraphMode.FULL: 7},
}
"""How the steps of ``every_kind_of_step`` run; NONE where a batch is beyond ``max_capture_tokens``, or mixed."""


@dataclass(frozen=True)
class Results:
    """Of one model: log-probabilities of each sequence by setting, and how its steps ran."""

    oracle: list[torch.Tensor]
    logprobs: dict[str, list[torch.Tensor]]
    steps: dict[str, dict[CUDAGraphMode, int]]


@pytest.fixture(scope="module", params=sorted(MODELS))
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp(request.param)
    oracle = make_model(request.param, folder)
    sequences = random_sequences(LENGTHS, vocab=VOCAB, seed=3)
    made = Results([oracle_logprobs(oracle, sequence) for sequence in sequences], {}, {})
    for seed, setting in enumerate(SETTINGS):
        harness = SimHarness(folder, setting, seed=seed)
        made.logprobs[setting] = harness.run(sequences, every_kind_of_step())
        made.steps[setting] = dict(harness.graphs.dispatcher.steps)
    return made


@pytest.mark.parametrize("setting", SETTINGS)
def test_logprobs_equal_transformers(results: Results, setting: str) -> None:
    for got, expected in zip(results.logprobs[setting], results.oracle, strict=True):
        assert got.shape == expected.shape
        assert torch.isfinite(got).all()
        assert float((got - expected).abs().max()) < PARITY_LOGPROB


@pytest.mark.parametrize("setting", SETTINGS)
def test_steps_run_in_the_mode_that_the_setting_asks_for(results: Results, setting: str) -> None:
    assert results.steps[setting] == STEPS[setting]


@pytest.mark.parametrize("setting", SETTINGS[1:])
def test_modes_give_the_same_bits_on_other_pages(results: Results, setting: str) -> None:
    check_bits(results.logprobs[setting], results.logprobs["none"])


def test_modes_give_the_same_bits_in_bf16(tmp_path: Path) -> None:
    make_model("glm5_next", tmp_path, dtype=torch.bfloat16)
    sequences = random_sequences(LENGTHS, vocab=VOCAB, seed=4)
    rows = {
        setting: SimHarness(tmp_path, setting, dtype="bfloat16").run(sequences, every_kind_of_step())
        for setting in SETTINGS
    }
    for setting in SETTINGS[1:]:
        check_bits(rows[setting], rows["none"])


def check_bits(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        rows = (a != b).any(dim=-1).nonzero().reshape(-1).tolist()
        assert not rows, f"sequence {i} differs at tokens {rows}"
