"""A first token sees nothing of its slot's last owner, even where its chunk is run as if it were a decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sidestream.core.cudagraph_mode import CUDAGraphMode
from tests.engine.harness import Harness, Part, oracle_logprobs, random_sequences
from tests.engine.sim.harness import VOCAB, SimHarness, captured_sizes, decodes, make_model
from tests.tolerances import PARITY_LOGPROB

LENGTHS = (7, 6)


@pytest.mark.parametrize("setting", ["cpu", "piecewise", "full"])
def test_a_first_token_run_as_a_decode_starts_from_nothing(setting: str, tmp_path: Path) -> None:
    """Both slots were left by longer sequences; the new ones begin alone and beside a decode."""
    oracle = make_model("glm5_next", tmp_path)
    limits: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 8}
    with captured_sizes(1, 2):
        harness = Harness(tmp_path, **limits) if setting == "cpu" else SimHarness(tmp_path, setting, **limits)
    harness.run(random_sequences((8, 7), vocab=VOCAB, seed=1), [[Part(0, 5), Part(1, 3)], [Part(0, 3), Part(1, 4)]])
    sequences = random_sequences(LENGTHS, vocab=VOCAB, seed=2)
    rows = harness.run(sequences, [decodes(0), *[decodes(0, 1)] * LENGTHS[1]])
    for got, sequence in zip(rows, sequences, strict=True):
        assert float((got - oracle_logprobs(oracle, sequence)).abs().max()) < PARITY_LOGPROB
    if isinstance(harness, SimHarness):
        assert harness.graphs.dispatcher.steps[CUDAGraphMode(setting)] >= LENGTHS[0]
