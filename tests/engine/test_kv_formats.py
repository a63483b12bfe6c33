"""The engine on every KV row format: quantised rows stay near full ones, and what a format cannot hold is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidestream.config.engine import EngineConfig
from sidestream.engine.build import build_engine
from sidestream.errors import ConfigError
from tests.engine.harness import Harness, chunked, decoded, random_sequences
from tests.tiny_models import VARIANTS, build_oracle, save_checkpoint
from tests.tolerances import BF16_ROWS_LOGPROB, FP8_ROWS_LOGPROB

LENGTHS = (70, 45)


@pytest.mark.parametrize(
    ("variant", "kv_cache_dtype", "bound"),
    [
        ("next", "bf16", BF16_ROWS_LOGPROB),
        ("next", "fp8_ds_mla", FP8_ROWS_LOGPROB),
        ("next", "mxfp8", FP8_ROWS_LOGPROB),
        ("dsa", "bf16", BF16_ROWS_LOGPROB),
        ("dsa", "fp8_ds_mla", FP8_ROWS_LOGPROB),
        ("kimi", "fp8_ds_mla", FP8_ROWS_LOGPROB),
    ],
)
def test_rows_are_near_full_precision(variant: str, kv_cache_dtype: str, bound: float, tmp_path: Path) -> None:
    architecture, overrides = VARIANTS[variant]
    folder = save_checkpoint(build_oracle(architecture, 17, **overrides), tmp_path)
    sequences = random_sequences(LENGTHS, vocab=136, seed=6)
    exact = Harness(folder).run(sequences, chunked(LENGTHS, 16))
    harness = Harness(folder, kv_cache_dtype=kv_cache_dtype)
    rounded = harness.run(sequences, decoded(LENGTHS, 24))
    again = Harness(folder, kv_cache_dtype=kv_cache_dtype, seed=5).run(sequences, decoded(LENGTHS, 24))
    errors = [float((a - b).abs().amax(-1).median()) for a, b in zip(exact, rounded, strict=True)]
    assert 0 < max(errors) < bound
    for first, second in zip(rounded, again, strict=True):
        assert first.equal(second), "the page order changed the bits"


def test_mxfp8_with_a_rope_part_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(build_oracle("glm_moe_dsa", 17), tmp_path)
    with pytest.raises(ConfigError, match=r"mxfp8.*qk_rope_head_dim 16"):
        build_engine(folder, EngineConfig(device="cpu", kv_cache_dtype="mxfp8"))
