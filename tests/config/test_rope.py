"""Rotary settings against transformers' own initialisation functions."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import DeepseekV32Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v32.modeling_deepseek_v32 import yarn_apply_mscale

from sidestream.config.model import ModelConfig, RopeConfig
from sidestream.errors import ConfigError
from tests.config.test_hf import tiny

YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"mscale": 1.0},
        {"mscale_all_dim": 0.7},
        {"mscale": 1.3, "mscale_all_dim": 0.7},
        {"mscale": 1.0, "mscale_all_dim": 0.0},
        {"attention_factor": 1.25, "mscale": 1.3, "mscale_all_dim": 0.7},
        {"rope_theta": 5000.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        {"factor": 1.0, "mscale": 1.3, "mscale_all_dim": 0.7},
    ],
)
def test_yarn_factors_are_those_of_transformers(extra: dict[str, Any]) -> None:
    settings = {**YARN, **extra}
    config = ModelConfig.from_hf(tiny("deepseek_v32", rope_parameters=dict(settings)))
    values = tiny("deepseek_v32", rope_parameters=dict(settings))
    oracle = DeepseekV32Config(**{k: v for k, v in values.items() if k != "model_type"})
    rope = config.mla.rope
    assert rope is not None
    _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](oracle, None)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    scale = yarn_apply_mscale(oracle.rope_parameters, oracle.qk_head_dim**-0.5)
    assert config.mla.softmax_scale == pytest.approx(scale, rel=1e-12)
    assert (rope.theta, rope.factor) == (oracle.rope_parameters["rope_theta"], settings["factor"])
    assert rope.truncate == settings.get("truncate", True)
    assert (rope.beta_fast, rope.beta_slow) == (settings.get("beta_fast", 32.0), settings.get("beta_slow", 1.0))


def test_hub_spelling_is_the_same_rotation() -> None:
    modern = tiny("deepseek_v32", rope_parameters={**YARN, "rope_theta": 5000.0})
    legacy = tiny("deepseek_v32", rope_parameters=None, rope_theta=5000.0)
    legacy["rope_scaling"] = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}
    assert ModelConfig.from_hf(legacy) == ModelConfig.from_hf(modern)
    plain = tiny("deepseek_v32", rope_parameters=None, rope_theta=5000.0)
    assert ModelConfig.from_hf(plain).mla.rope == RopeConfig(rope_type="default", theta=5000.0)
    nothing = tiny("deepseek_v32", rope_parameters=None)
    assert ModelConfig.from_hf(nothing).mla.rope == RopeConfig(rope_type="default", theta=10000.0)


def test_original_length_defaults_to_the_longest_position() -> None:
    values = tiny("deepseek_v32", rope_parameters={"rope_type": "yarn", "factor": 2.0})
    rope = ModelConfig.from_hf(values).mla.rope
    assert rope is not None
    assert rope.original_max_position_embeddings == values["max_position_embeddings"]
    values["original_max_position_embeddings"] = 128
    rope = ModelConfig.from_hf(values).mla.rope
    assert rope is not None
    assert rope.original_max_position_embeddings == 128


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "linear", "factor": 2.0}, "rope type 'linear' is not supported"),
        ({"type": "dynamic", "factor": 2.0}, "rope type 'dynamic'"),
        ({"rope_type": "yarn"}, "required key factor is missing"),
        ({"rope_type": "yarn", "factor": 0}, "factor is 0"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_type": "default", "low_freq_factor": 1.0}, "low_freq_factor"),
        ({"rope_type": "default", "rope_theta": -1.0}, "rope_theta is -1.0"),
        ("yarn", "rope_parameters is 'yarn', it must be a dictionary"),
    ],
)
def test_other_rotations_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(tiny("deepseek_v32", rope_parameters=settings))
