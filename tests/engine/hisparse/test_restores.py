"""Blocks come back to a device that has room again: the same bits before, meanwhile and after, and all are counted."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sidestream.cache.placement import BACK_A_STEP
from sidestream.config.engine import EngineConfig
from sidestream.engine.build import build_engine
from tests.engine.hisparse.pressed import host_memory, placement_of
from tests.engine.hisparse.restored_blocks import asked_of, check_restores, settings_for
from tests.engine.hisparse.test_serving import HOSTED, SETTINGS, act, both, prompt, same
from tests.engine.prefix.serving import Serving
from tests.engine.sim.harness import make_model, open_sim


@pytest.fixture(scope="module", params=["glm5_next", "glm_moe_dsa"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    make_model(request.param, made)
    return made


def test_what_left_comes_back_when_others_are_gone(folder: Path) -> None:
    """A short request whose first blocks left while two long ones ran decodes on alone."""
    servings = both(folder, enable_prefix_caching=False)
    hosted = servings[0]
    act(servings, lambda s: s.add("stays", prompt(40, 1), max_tokens=60))
    for i in range(2):
        act(servings, lambda s, i=i: s.add(f"goes{i}", prompt(70, 2 + i), max_tokens=4))  # type: ignore[misc]
    placement, runtime = placement_of(hosted.built), hosted.built.runner.hisparse
    assert runtime is not None
    most = 0
    while servings[0].core.has_work():
        before = placement.num_restored
        act(servings, lambda s: s.step())
        most = max(most, placement.num_restored - before)
        placement.check_integrity()
    assert placement.num_restored >= 3
    assert most <= BACK_A_STEP
    (own,) = {s.request_id for s in hosted.core.scheduler._running} or {"stays"}
    assert own == "stays"
    stats = runtime.stats()
    assert stats.restored_blocks == placement.num_restored
    assert stats.restored_bytes == placement.num_restored * hosted.built.pools.groups.kv.bytes_per_block
    assert asdict(stats) == runtime.counters()
    same(*servings)


def test_nothing_misses_once_everything_is_back(folder: Path) -> None:
    servings = both(folder, enable_prefix_caching=False)
    hosted = servings[0]
    act(servings, lambda s: s.add("stays", prompt(40, 1), max_tokens=100))
    for i in range(2):
        act(servings, lambda s, i=i: s.add(f"goes{i}", prompt(70, 2 + i), max_tokens=4))  # type: ignore[misc]
    placement, runtime = placement_of(hosted.built), hosted.built.runner.hisparse
    assert runtime is not None
    selected = []
    while servings[0].core.has_work():
        act(servings, lambda s: s.step())
        running = list(hosted.core.scheduler._running)
        if running and [s.request_id for s in running] == ["stays"] and not placement.on_host(running[0].block_ids):
            selected.append(runtime.stats().selected_rows)
    assert len(selected) > 10
    assert selected[2] > 0
    assert selected[2] == selected[10]
    same(*servings)


def test_a_device_that_stays_short_brings_nothing_back(folder: Path) -> None:
    serving = Serving(folder, **SETTINGS, hisparse_host_memory=host_memory(folder, HOSTED), enable_prefix_caching=False)
    for i in range(3):
        serving.add(f"r{i}", prompt(110, i), max_tokens=20)
    while serving.core.has_work():
        if serving.core.scheduler.num_running == 3:
            assert placement_of(serving.built).num_restored == 0
        serving.step()
    assert placement_of(serving.built).num_spilled > 20


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_ds_mla"])
def test_the_body_that_a_gpu_runs_too(folder: Path, kv_cache_dtype: str) -> None:
    plain: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_dtype": kv_cache_dtype}
    plain |= {"memory_limit": "1GiB"}
    hosted = EngineConfig(**plain | settings_for(8, 12), hisparse_host_memory=host_memory(folder, 60))
    resident = EngineConfig(**plain | settings_for(8, 80))
    check_restores(build_engine(folder, hosted), build_engine(folder, resident), asked_of(8))


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_on_streams(folder: Path, mode: str) -> None:
    """The copies run beside steps of graphs; no hazard, and the tokens of an engine that holds everything."""
    short: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 2, "num_blocks": 10, "max_capture_tokens": 4}
    short |= {"enable_prefix_caching": False, "hisparse_watermark": 0.05}
    hosted, resident = (
        Serving(
            folder,
            recorded=False,
            backend=open_sim(seed=5) if device == "sim" else None,
            **SETTINGS | short | pools,
            device=device,
            cudagraph_mode=mode if device == "sim" else "none",
        )
        for device, pools in (
            ("sim", {"hisparse_host_memory": host_memory(folder, HOSTED)}),
            ("cpu", {"num_blocks": 10 + HOSTED}),
        )
    )
    act((hosted, resident), lambda s: s.add("stays", prompt(36, 1), max_tokens=24))
    act((hosted, resident), lambda s: s.add("goes", prompt(60, 2), max_tokens=2))
    act((hosted, resident), lambda s: s.run())
    assert placement_of(hosted.built).num_restored > 1
    for name, served in hosted.served.items():
        assert served.tokens == resident.served[name].tokens
    hosted.built.runner.streams.backend.check()  # type: ignore[attr-defined]
