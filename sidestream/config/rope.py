"""Rotary settings of a hub config, spelt ``rope_parameters`` or ``rope_scaling`` with ``rope_theta``."""

from __future__ import annotations

import math

from sidestream.config.fields import Fields
from sidestream.config.model import RopeConfig

DEFAULT_THETA = 10000.0
_YARN_KEYS = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")


def read_rope(fields: Fields, *, max_position_embeddings: int) -> tuple[RopeConfig, float]:
    """The rotation and the factor that yarn puts on the softmax scale (1.0 without yarn).

    Formulas: ``_compute_yarn_parameters`` in transformers ``modeling_rope_utils.py`` (factor of cos and sin),
    ``yarn_apply_mscale`` in ``modeling_deepseek_v32.py`` (softmax scale).

    Raises:
        ConfigError: for a rope type other than default and yarn, partial rotation, unknown or missing keys.
    """
    legacy, modern = fields.nested("rope_scaling"), fields.nested("rope_parameters")
    theta = fields.real("rope_theta", DEFAULT_THETA)
    original = fields.integer("original_max_position_embeddings", 0)
    fields.require("partial_rotary_factor", 1.0, "the whole rope slice is rotated")
    rope = (legacy if fields.raw("rope_scaling") else modern) or Fields({}, fields.where, {})
    rope.require("partial_rotary_factor", 1.0, "the whole rope slice is rotated")
    theta = rope.real("rope_theta", theta)
    rope_type = rope.raw("rope_type") or rope.raw("type") or "default"
    if rope_type not in ("default", "yarn"):
        raise rope.error(f"rope type {rope_type!r} is not supported, only 'default' and 'yarn'")
    rope.refuse_unread(
        [*_YARN_KEYS, "original_max_position_embeddings", "type"], knob="remove them from the rope settings"
    )
    if rope_type == "default":
        return RopeConfig(rope_type="default", theta=theta), 1.0

    factor = rope.real("factor")
    mscale = rope.real("mscale", 0.0, positive=False)
    mscale_all_dim = rope.real("mscale_all_dim", 0.0, positive=False)
    if rope.raw("attention_factor") is not None:
        attention_factor = rope.real("attention_factor")
    elif mscale and mscale_all_dim:
        attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    else:
        attention_factor = _mscale(factor, 1.0)
    config = RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original
        or rope.integer("original_max_position_embeddings", max_position_embeddings),
        beta_fast=rope.real("beta_fast", 32.0, positive=False) or 32.0,
        beta_slow=rope.real("beta_slow", 1.0, positive=False) or 1.0,
        attention_factor=attention_factor,
        truncate=rope.flag("truncate", True),
    )
    return config, _mscale(factor, mscale_all_dim) ** 2 if mscale_all_dim else 1.0


def _mscale(factor: float, mscale: float) -> float:
    """Growth of attention with the logarithm of the context's extension (YaRN, arXiv 2309.00071)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
