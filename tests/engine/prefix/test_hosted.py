"""The prefix cache over blocks whose rows lie in the host pool (HiSparse): cached prefixes are mostly cold ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sidestream.config.model import ModelConfig
from tests.engine.harness import random_sequences
from tests.engine.prefix.serving import BLOCK, VOCAB, Serving
from tests.engine.prefix.test_prompts import Model

STEM, ELSE = random_sequences((160, 150), vocab=VOCAB, seed=16)


@pytest.fixture(scope="module", params=["next", "dsa"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


def host_bytes(folder: Path, blocks: int) -> int:
    """Of so many blocks of fp32 rows."""
    config = ModelConfig.from_hf(folder)
    row = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    layers = sum(layer.attention.value.endswith("mla") for layer in config.layers)
    return blocks * layers * BLOCK * row * 4


def test_a_prefix_is_taken_over_from_the_host_pool(model: Model) -> None:
    """Ten places on the device for thirty blocks: the stem has left it when its follower comes. The same bits as with
    all blocks on the device, at the same schedule."""
    rows = {}
    for places in (10, 60):
        hosted = {"hisparse_host_memory": host_bytes(model.folder, 40)} if places == 10 else {}
        serving = Serving(model.folder, num_blocks=places, max_num_batched_tokens=32, max_num_seqs=2, **hosted)
        serving.serve("stem", [*STEM, 9], max_tokens=2)
        serving.serve("else", ELSE, max_tokens=2)
        served = serving.serve("follower", [*STEM, 10, 11], max_tokens=6)
        assert served.cached_tokens == 160
        model.check(served)
        rows[places] = served.rows
        if hosted:
            runtime = serving.built.runner.hisparse
            assert runtime is not None
            assert runtime.placement.num_spilled >= 10
    assert rows[10].keys() == rows[60].keys()
    for position, row in rows[60].items():
        assert torch.equal(rows[10][position], row), position
