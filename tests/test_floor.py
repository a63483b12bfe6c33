"""The floor of a decode step, against figures counted apart from it, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.floor import decode_floor
from sidestream.config.model import ModelConfig
from sidestream.engine.bundled import known_configs

CONFIGS = Path(__file__).parents[1] / "benchmarks" / "configs"


@pytest.mark.parametrize(
    ("batch", "context", "ms"), [(1, 2048, 1.40), (1, 32768, 1.40), (8, 8192, 4.29), (32, 8192, 6.33), (64, 8192, 6.82)]
)
def test_slice_a(batch: int, context: int, ms: float) -> None:
    model = ModelConfig.from_hf(CONFIGS / "glm5-next-slice-a.json")
    assert decode_floor(model, batch=batch, context=context).ms() == pytest.approx(ms, rel=0.003)


def test_a_token_of_one_layer_each_counted_by_hand() -> None:
    model = ModelConfig.from_hf(CONFIGS / "glm5-next-slice-a.json")
    floor = decode_floor(model, batch=1, context=8192)
    assert floor.states == 2 * 6 * 64 * 128 * 128 * 4
    assert floor.rows == 2 * 2051 * 512 * 2
    assert floor.index_keys == 2 * 2048 * 128 * 2
    assert floor.experts == 7 * 8 * 3 * 4096 * 2048 * 2


@pytest.mark.parametrize("path", [*known_configs().values(), *sorted(CONFIGS.glob("*.json"))], ids=lambda p: p.stem)
def test_every_known_config_has_a_floor_that_grows(path: Path) -> None:
    model = ModelConfig.from_hf(path)
    floors = [decode_floor(model, batch=batch, context=8192).total for batch in (1, 2, 32)]
    assert 0 < floors[0] < floors[1] < floors[2]
    assert decode_floor(model, batch=1, context=16384).total > floors[0]
