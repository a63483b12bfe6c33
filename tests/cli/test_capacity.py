"""``sidestream capacity``: counted by hand for the model whose sizes are public, and wrong questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sidestream.cli.main import app
from sidestream.config.model import ModelConfig
from sidestream.engine.capacity import GIB, CapacitySettings, capacity
from sidestream.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"


def test_deepseek_v32_by_hand() -> None:
    """61 layers of 512 + 64 values in bf16; each with index keys of 128; 2,048 selected."""
    model = ModelConfig.from_hf(CONFIGS / "deepseek-v3.2.json")
    found = capacity(model, CapacitySettings(context=65536, devices=16, host_memory=40 * GIB))
    assert found.kv_per_token == 61 * 576 * 2
    assert found.index_keys_per_token == 61 * 128 * 2
    assert found.state_per_sequence == 0
    assert found.hot_per_sequence == 2 * 2048 * 61 * 576 * 2
    assert 671e9 * 2 / 16 < found.weights < 690e9 * 2 / 16
    free = 141 * 10**9 - 6 * GIB - found.weights
    assert found.resident.requests == free // (65536 * 61 * (576 + 128) * 2)
    assert found.hosted is not None
    on_device = free // (65536 * 61 * 128 * 2 + found.hot_per_sequence)
    assert found.hosted.requests == min(on_device, 40 * GIB // (65536 * 61 * 576 * 2))
    assert found.hosted.tokens == 65536 * found.hosted.requests
    assert found.hosted.limit == "host memory"
    roomy = capacity(model, CapacitySettings(context=65536, devices=16, host_memory=4000 * GIB)).hosted
    assert roomy is not None
    assert (roomy.requests, roomy.limit) == (on_device, "device memory")
    assert found.bus_ms[0.9] == pytest.approx(0.1 * 2048 * 61 * 1152 / 53e9 * 1e3)


def test_rows_of_fewer_bytes_let_more_fit() -> None:
    model = ModelConfig.from_hf(CONFIGS / "glm5-next-slice-a.json")
    plain, small = (
        capacity(model, CapacitySettings(kv_cache_dtype=name, host_memory=8 * GIB)) for name in ("bf16", "mxfp8")
    )
    assert small.kv_per_token == plain.kv_per_token * 528 / 1024
    assert small.resident.requests > plain.resident.requests
    assert plain.hosted is not None
    assert small.hosted is not None
    assert small.hosted.requests > plain.hosted.requests
    assert plain.state_per_sequence > 6 * 64 * 128 * 128 * 4


def test_weights_that_do_not_fit_are_named() -> None:
    found = capacity(ModelConfig.from_hf(CONFIGS / "deepseek-v3.2.json"), CapacitySettings())
    assert (found.resident.requests, found.resident.limit) == (0, "weights: more devices are needed")


def test_a_model_without_cold_rows() -> None:
    found = capacity(ModelConfig.from_hf(CONFIGS / "kimi-linear-48b.json"), CapacitySettings())
    assert found.hosted is None
    assert found.bus_ms == {}
    assert found.resident.requests > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 10**9}, "context 1000000000 is not between 1 and the model's max_position_embeddings"),
        ({"devices": 0}, "devices is 0, at least 1 is needed"),
        ({"kv_cache_dtype": "mxfp8"}, "'mxfp8' has no place for a rope part"),
    ],
)
def test_wrong_questions_name_themselves(change: dict[str, object], message: str) -> None:
    model = ModelConfig.from_hf(CONFIGS / "deepseek-v32-slice-b.json")
    with pytest.raises(ConfigError, match=message):
        capacity(model, CapacitySettings(**change))  # type: ignore[arg-type]


def test_the_command_prints_a_table_or_json() -> None:
    runner = CliRunner()
    asked = ["capacity", str(CONFIGS / "glm5-next-slice-a.json"), "--context", "8192"]
    shown = runner.invoke(app, asked, env={"COLUMNS": "140"})
    assert shown.exit_code == 0, shown.output
    assert "requests of 8,192 tokens" in shown.output
    assert "with a host pool" in shown.output
    found = json.loads(runner.invoke(app, [*asked, "--json"]).output)
    assert f"{found['resident']['requests']:,}" in shown.output
