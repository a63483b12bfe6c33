"""``sidestream capacity``: counted by hand for the model whose sizes are public, and wrong questions."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sidestream.cache.groups import plan_cache_groups
from sidestream.cli.main import app
from sidestream.config.engine import EngineConfig
from sidestream.config.model import ModelConfig
from sidestream.config.resolved import resolve
from sidestream.engine.bundled import bundled_model, known_configs
from sidestream.engine.capacity import GIB, CapacitySettings, capacity
from sidestream.engine.hosting import hosted_sizes
from sidestream.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"


def test_deepseek_v32_by_hand() -> None:
    """61 layers of 512 + 64 values in bf16; each with index keys of 128; 2,048 selected."""
    model = ModelConfig.from_hf(known_configs()["deepseek-v3.2"])
    found = capacity(model, CapacitySettings(context=65536, devices=16, host_memory=40 * GIB))
    assert found.kv_per_token == 61 * 576 * 2
    assert found.index_keys_per_token == 61 * 128 * 2
    assert found.state_per_sequence == 0
    assert found.hot_per_sequence == 2 * 2048 * 61 * 576 * 2
    assert 671e9 * 2 / 16 < found.weights < 690e9 * 2 / 16
    free = 141 * 10**9 - 6 * GIB - found.weights
    assert found.resident.requests == free // (65536 * 61 * (576 + 128) * 2)
    assert found.hosted is not None
    staged, tables = 2 * 65536 * 576 * 2, 61 * (4 * 65536 + 32 * 2 * 2048)
    on_device = (free - staged) // (65536 * 61 * 128 * 2 + found.hot_per_sequence + tables)
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
    model = ModelConfig.from_hf(known_configs()["deepseek-v3.2"])
    found = capacity(model, CapacitySettings())
    assert (found.resident.requests, found.resident.limit) == (0, "weights, and 6 GiB to work with")
    least = found.least_devices
    fits = [capacity(model, CapacitySettings(context=1, devices=n)).resident.requests > 0 for n in (least - 1, least)]
    assert fits == [False, True]
    assert capacity(model, CapacitySettings(device_memory=6 * GIB)).least_devices == 0


def test_a_model_without_cold_rows() -> None:
    found = capacity(ModelConfig.from_hf(known_configs()["kimi-linear-48b"]), CapacitySettings())
    assert found.hosted is None
    assert found.bus_ms == {}
    assert found.resident.requests > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 10**9}, "context 1000000000 is not between 1 and the model's max_position_embeddings"),
        ({"devices": 0}, "devices is 0, at least 1 is needed"),
        ({"host_memory": -1}, "host_memory is -1, at least 0 is needed"),
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


@pytest.mark.parametrize("none", ["0", "0GB", "0.0 GiB"])
def test_without_a_host_pool_the_answer_is_the_devices_alone(none: str) -> None:
    runner = CliRunner()
    asked = ["capacity", str(CONFIGS / "glm5-next-slice-a.json")]
    pooled = json.loads(runner.invoke(app, [*asked, "--json"]).output)
    alone = json.loads(runner.invoke(app, [*asked, "--host-memory", none, "--json"]).output)
    assert alone == {**pooled, "hosted": None, "hot_per_sequence": 0, "bus_ms": {}}
    shown = runner.invoke(app, [*asked, "--host-memory", none], env={"COLUMNS": "140"}).output
    assert "host pool" not in shown
    assert "all on the device" in shown


def test_without_a_model_it_counts_for_the_bundled_one() -> None:
    runner = CliRunner()
    found = json.loads(runner.invoke(app, ["capacity", "--json"]).output)
    assert found == json.loads(runner.invoke(app, ["capacity", str(bundled_model()), "--json"]).output)
    assert found["resident"]["tokens"] == 32768 * found["resident"]["requests"] > 0
    shown = runner.invoke(app, ["capacity"], env={"COLUMNS": "140"}).output
    assert re.search(
        r"the step before did not select: [0-9.]+ us if 80%, .* us if 99% of its tokens are the same", shown
    )


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5.2", "glm-5.3-flash", "kimi-linear-48b", "DeepSeek-V3.2"])
def test_published_models_are_known_by_name(name: str) -> None:
    runner = CliRunner()
    found = json.loads(runner.invoke(app, ["capacity", name, "--memory", "141GiB", "--json"]).output)
    model = ModelConfig.from_hf(known_configs()[name.lower()])
    assert found["weights"] == capacity(model, CapacitySettings(device_memory=141 * GIB)).weights > 90e9
    assert name.lower() in runner.invoke(app, ["capacity", "--help"]).output


def test_weights_that_do_not_fit_say_over_how_many_devices_they_would() -> None:
    shown = CliRunner().invoke(app, ["capacity", "deepseek-v3.2"], env={"COLUMNS": "140"}).output
    assert "the weights do not fit 1 device of 141 GB; split over --devices 10 they would" in shown
    shown = CliRunner().invoke(app, ["capacity", "deepseek-v3.2", "--devices", "10"], env={"COLUMNS": "140"}).output
    assert "do not fit" not in shown


def test_a_path_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "glm-5.2").symlink_to(bundled_model())
    monkeypatch.chdir(tmp_path)
    found = json.loads(CliRunner().invoke(app, ["capacity", "glm-5.2", "--json"]).output)
    assert found == json.loads(CliRunner().invoke(app, ["capacity", "--json"]).output)
    error = CliRunner().invoke(app, ["capacity", "glm-5"]).exception
    assert str(error) == (
        "model 'glm-5' is no folder and no file here, and none of the names deepseek-v3.2, glm-5.2, glm-5.3-flash, "
        "kimi-linear-48b"
    )


def test_what_it_promises_an_engine_of_that_size_takes() -> None:
    """Every part that the engine sizes for so many requests, against the same device."""
    model = ModelConfig.from_hf(CONFIGS / "glm5-next-slice-a.json")
    for context in (32768, 131072):
        settings = CapacitySettings(context=context, host_memory=400 * GIB)
        found = capacity(model, settings)
        assert found.hosted is not None
        requests = found.hosted.requests
        assert requests > found.resident.requests
        user = EngineConfig(
            device="cpu",
            dtype="bfloat16",
            load_format="dummy",
            max_num_seqs=requests,
            max_num_batched_tokens=requests,
            max_model_len=context,
            hisparse_host_memory=1,
        )
        config = resolve(user, model, cuda_available=False, device_memory=settings.device_memory)
        row = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
        groups = plan_cache_groups(
            model, block_size=64, row_elems=row, row_dtype=torch.bfloat16, model_dtype=torch.bfloat16
        )
        host = requests * context // 64 * groups.kv.bytes_per_block
        sizes = hosted_sizes(replace(config, host_memory=host), groups)
        assert sizes is not None
        needed = sum(sizes.bytes_by_kind(groups).values()) + (requests + 1) * groups.bytes_per_slot
        assert needed + found.weights < settings.device_memory - 4 * GIB  # places of one step and the rest are in those


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--device-memory", "60%", "device_memory (--device-memory) is '60%'; give bytes ('8589934592'), or a number"),
        ("--device-memory", "80G", "device_memory (--device-memory) is '80G'; give bytes"),
        ("--memory", "80", "device_memory (--device-memory) is '80', which is 80 bytes; give a unit, such as '80GB'"),
        ("--device-memory", "80", "is '80', which is 80 bytes; give a unit, such as '80GB'"),
        ("--device-memory", "0", "is '0', which is 0 bytes; at least 1048576 are needed"),
        ("--device-memory", "80KB", "is '80KB', which is 80000 bytes; at least 1048576 are needed"),
        ("--host-memory", "64", "host_memory (--host-memory) is '64', which is 64 bytes; give a unit"),
        ("--host-memory", "0.5", "host_memory (--host-memory) is '0.5'; give bytes"),
        ("--host-memory", "-1GB", "host_memory (--host-memory) is '-1GB'; give bytes"),
        ("--dtype", "auto", "dtype is 'auto', allowed are"),
    ],
)
def test_wrong_options_name_themselves(option: str, value: str, message: str) -> None:
    config = str(CONFIGS / "glm5-next-slice-a.json")
    error = CliRunner().invoke(app, ["capacity", config, option, value]).exception
    assert message in str(error)
