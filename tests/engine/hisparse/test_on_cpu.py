"""HiSparse against an engine that keeps everything on its device: the same bits; against the oracle: within 1e-4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.harness import Harness, oracle_logprobs, random_sequences
from tests.engine.hisparse.pressed import PRESSED, host_memory, long_and_short, open_blocks, placement_of
from tests.engine.sim.harness import VOCAB, make_model
from tests.tolerances import PARITY_LOGPROB

LENGTHS = [180, 97, 150]


@pytest.mark.parametrize("model", ["glm5_next", "glm_moe_dsa", "deepseek_v32"])
def test_the_same_bits_with_a_device_of_a_few_blocks(model: str, tmp_path: Path) -> None:
    oracle = make_model(model, tmp_path)
    sequences = random_sequences(LENGTHS, vocab=VOCAB, seed=5)
    schedule = long_and_short(LENGTHS, 120)
    resident = Harness(tmp_path, **PRESSED | {"num_blocks": 90})
    want = resident.run(sequences, schedule)
    for sequence, rows in zip(sequences, want, strict=True):
        assert (rows - oracle_logprobs(oracle, sequence)).abs().max() < PARITY_LOGPROB
    for factor in (1, 2, 4):
        pressed = Harness(tmp_path, **PRESSED, hisparse_host_memory=host_memory(tmp_path), hisparse_hot_factor=factor)
        open_blocks(pressed, factor)
        got = pressed.run(sequences, schedule)
        placement = placement_of(pressed.built)
        assert placement.num_spilled > 40
        placement.check_integrity()
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
