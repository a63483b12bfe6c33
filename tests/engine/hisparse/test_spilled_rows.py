"""Fault 7 of docs/faults.md, on a CPU and the simulated device; ``tests/gpu/engine/test_hisparse.py`` is of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidestream.config.engine import EngineConfig
from sidestream.engine.build import build_engine
from tests.engine.hisparse.pressed import host_memory
from tests.engine.hisparse.spilled_rows import check_spilled_rows, settings_for
from tests.engine.sim.harness import make_model, open_sim, sim_config
from tests.tiny_models import VARIANTS, build_oracle, save_checkpoint

PROMPT, BLOCK = 44, 8


@pytest.mark.parametrize(
    ("variant", "kv_cache_dtype"),
    [
        ("next", "auto"),
        ("next", "bf16"),
        ("next", "fp8_ds_mla"),
        ("next", "mxfp8"),
        ("dsa", "bf16"),
        ("dsa", "fp8_ds_mla"),
    ],
)
def test_in_every_row_format(variant: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    architecture, overrides = VARIANTS[variant]
    save_checkpoint(build_oracle(architecture, 17, **overrides), tmp_path)
    settings = settings_for(PROMPT, BLOCK, chunk=16)
    built = build_engine(
        tmp_path,
        EngineConfig(
            device="cpu",
            dtype="float32",
            kv_cache_dtype=kv_cache_dtype,
            hisparse_host_memory=host_memory(tmp_path, 40),
            **settings,
        ),
    )
    built.pools.poison()
    check_spilled_rows(built, PROMPT)


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_in_captured_steps(mode: str, tmp_path: Path) -> None:
    make_model("glm_moe_dsa", tmp_path)
    settings = settings_for(PROMPT, BLOCK, chunk=16) | {"max_capture_tokens": 4}
    config = sim_config(mode, hisparse_host_memory=host_memory(tmp_path, 40), **settings)
    backend = open_sim(seed=4)
    built = build_engine(tmp_path, config, backend=backend)
    with built.runner.on_device():
        built.pools.poison()
    check_spilled_rows(built, PROMPT)
    backend.check()
