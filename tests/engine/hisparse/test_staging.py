"""Staging places are as many as a step's prefills may need and no more; tables are as long as sequences may be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sidestream.cache import host_pool
from sidestream.cache.host_pool import SPARE_BYTES
from sidestream.cache.hosted_rows import HostedSizes
from sidestream.core.batch import Chunk
from sidestream.engine import build
from sidestream.errors import CapacityError, ConfigError
from tests.engine.hisparse.pressed import host_memory, placement_of
from tests.engine.hisparse.test_serving import SETTINGS, act, prompt, same
from tests.engine.prefix.serving import Serving
from tests.engine.sim.harness import make_model

LONGEST = 160 // 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    make_model("glm_moe_dsa", made)
    return made


def sizes_of(serving: Serving) -> HostedSizes:
    assert serving.built.pools.hosted is not None
    return serving.built.pools.hosted.sizes


def hosted(folder: Path, blocks: int, **settings: Any) -> Serving:
    return Serving(folder, **SETTINGS | settings, hisparse_host_memory=host_memory(folder, blocks))


@pytest.mark.parametrize(
    ("blocks", "settings", "staged", "limit"),
    [
        (12, {}, 12, None),  # all that can be on the host
        (400, {}, 2 * LONGEST, 2 * LONGEST),
        (400, {"max_num_seqs": 2}, 2 * LONGEST, None),  # more than two sequences never run
        (400, {"hisparse_staged_tokens": 161}, 21, 21),
        (400, {"hisparse_staged_tokens": 10_000}, 3 * LONGEST, None),
        (12, {"hisparse_staged_tokens": 100}, 12, None),
    ],
)
def test_as_many_as_a_step_can_need(
    folder: Path, blocks: int, settings: dict[str, Any], staged: int, limit: int | None
) -> None:
    serving = hosted(folder, blocks, **settings)
    sizes = sizes_of(serving)
    assert (sizes.staged, sizes.context_limit) == (staged, limit)
    assert serving.core.scheduler.config.max_prefill_context == limit
    parts = {part.name: part for part in serving.built.ledger.parts}
    groups = serving.built.pools.groups
    assert parts["staged rows"].measured == staged * groups.kv.bytes_per_block // len(groups.kv.layers)


def test_less_than_one_sequence_may_need_is_refused(folder: Path) -> None:
    message = (
        r"hisparse_staged_tokens 152 is less than the 20 KV blocks of 8 .* max_model_len 160 .* raise it, or lower"
    )
    with pytest.raises(CapacityError, match=message):
        hosted(folder, 400, hisparse_staged_tokens=152)


@pytest.mark.parametrize("value", [0, -5, "many", True, 1.5])
def test_a_wrong_setting_names_itself(folder: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"hisparse_staged_tokens must be a positive integer or None, got"):
        hosted(folder, 400, hisparse_staged_tokens=value)


def test_prefills_beyond_the_limit_wait_and_end_with_the_same_bits(folder: Path) -> None:
    """Three long prompts whose contexts fit no step together. Each runs in the chunks of an engine that keeps all rows
    on its device and has the same limit."""
    tight: dict[str, Any] = {
        "hisparse_staged_tokens": 160,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 48,
    }
    pressed = hosted(folder, 70, **tight | {"num_blocks": 14})
    roomy = hosted(folder, 70, **tight | {"num_blocks": 84})
    staged: list[int] = []
    runtime = pressed.built.runner.hisparse
    assert runtime is not None
    begin = runtime.begin_step

    def counted(chunks: Sequence[Chunk]) -> None:
        begin(chunks)
        if runtime.staged_table is not None:
            staged.append(int(runtime.staged_table.max()) + 1)

    runtime.begin_step = counted  # type: ignore[method-assign]
    for i in range(3):
        act((pressed, roomy), lambda s, i=i: s.add(f"r{i}", prompt(150 - i, i), max_tokens=6))  # type: ignore[misc]
    act((pressed, roomy), lambda s: s.run())
    assert placement_of(pressed.built).num_spilled > 30
    assert placement_of(roomy.built).num_spilled == 0
    assert 8 < max(staged) <= LONGEST
    same(pressed, roomy)


def test_tables_are_as_long_as_sequences_may_be_in_the_end(folder: Path) -> None:
    """Without max_model_len the model's 2,048 tokens are asked for, and fewer fit: the pools' 30 blocks of 8."""
    short: dict[str, Any] = {"num_blocks": 10, "max_num_batched_tokens": 16, "max_num_seqs": 2}
    settings = {key: value for key, value in SETTINGS.items() if key != "max_model_len"} | short
    serving = Serving(folder, **settings, hisparse_host_memory=host_memory(folder, 20))
    assert serving.built.max_model_len == 30 * 8
    sizes = sizes_of(serving)
    assert sizes.max_blocks == 30
    runtime = serving.built.runner.hisparse
    assert runtime is not None
    for group in runtime._groups:
        assert group._slot_of.shape == (3, 30 * 8 + 1)
    parts = {part.name: part for part in serving.built.ledger.parts}
    assert parts["tables of hot slots"].predicted == parts["tables of hot slots"].measured == runtime.table_bytes
    serving.add("longest", prompt(230, 1), max_tokens=9)
    serving.run()
    assert len(serving.served["longest"].tokens) == 9


def test_a_length_that_may_shrink_leaves_room_for_blocks(folder: Path) -> None:
    """Tables of the model's longest sequence for 200 seats would take all that memory_limit leaves."""
    plain: dict[str, Any] = {
        "block_size": 8,
        "max_num_seqs": 200,
        "max_num_batched_tokens": 200,
        "enable_prefix_caching": False,
    }
    memory: dict[str, Any] = {"hisparse_host_memory": host_memory(folder, 1000), "num_blocks": None}
    weights = hosted(folder, 9).built.weight_bytes
    serving = Serving(folder, **plain, **memory, memory_limit=weights + (7 << 20))
    assert 64 < serving.built.max_model_len < 2048
    with pytest.raises(CapacityError, match="tables of hot slots"):
        Serving(folder, **plain, **memory, memory_limit=weights + (7 << 20), max_model_len=2048)


def test_a_host_pool_without_room_is_refused_before_weights_are_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = SimpleNamespace(available=host_memory(folder, 12) + SPARE_BYTES - 1, total=2**40)
    monkeypatch.setattr(host_pool.psutil, "virtual_memory", lambda: left)
    monkeypatch.setattr(build, "load_model", lambda *_args, **_settings: pytest.fail("weights were loaded"))
    with pytest.raises(CapacityError, match="lower hisparse_host_memory"):
        hosted(folder, 12)
