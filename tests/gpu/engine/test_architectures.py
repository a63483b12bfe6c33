"""All four architectures on a GPU: the same bits in every mode, and what the CPU engine gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidestream.config.engine import EngineConfig
from sidestream.engine.build import build_engine, in_graph_mode
from tests.gpu.engine.machine import prompts, run
from tests.tiny_models import ARCHITECTURES, build_oracle, save_checkpoint
from tests.tolerances import PARITY_LOGPROB

pytestmark = pytest.mark.gpu

SETTINGS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "block_size": 8,
    "num_blocks": 60,
    "memory_limit": "90%",
}
CLOSE = 10 * PARITY_LOGPROB
"""Two best tokens closer than this may change places between a CPU and a GPU."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_mode_gives_the_same_bits(name: str, dtype: str, tmp_path: Path) -> None:
    save_checkpoint(build_oracle(name, 3), tmp_path)
    user = EngineConfig(device="cuda", dtype=dtype, cudagraph_mode="none", graph_debug=True, **SETTINGS)  # type: ignore[arg-type]
    built = build_engine(tmp_path, user)
    asked = prompts(6, 70, seed=4, vocab=100)
    expected = run(built, asked, max_tokens=20)
    for mode in ("piecewise", "full", "full_and_piecewise"):
        assert run(in_graph_mode(built, mode), asked, max_tokens=20) == expected, mode


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fp32_gives_what_the_cpu_gives(name: str, tmp_path: Path) -> None:
    save_checkpoint(build_oracle(name, 3), tmp_path)
    asked = prompts(6, 70, seed=5, vocab=100)
    runs = []
    for device in ("cpu", "cuda"):
        user = EngineConfig(device=device, dtype="float32", **SETTINGS)  # type: ignore[arg-type]
        runs.append(run(build_engine(tmp_path, user), asked, max_tokens=20))
    compared = 0
    for theirs, mine in zip(*runs, strict=True):
        for (token, logprob), (other, expected) in zip(mine, theirs, strict=True):
            assert abs(logprob - expected) < (PARITY_LOGPROB if token == other else CLOSE)
            if token != other:
                break  # a close call; what follows has another past
            compared += 1
    assert compared > 60
