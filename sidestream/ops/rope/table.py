"""Cosines and sines of every position, once a model."""

from __future__ import annotations

import math

import torch

from sidestream.config.model import RopeConfig


def rope_table(rope: RopeConfig, rope_dim: int, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles of the positions ``[0, max_positions)``, with the attention factor multiplied in.

    Formulas: ``compute_default_rope_parameters`` of transformers' ``deepseek_v32`` and the "by parts" interpolation of
    YaRN (Peng et al. 2023, section 3.2) as in its ``modeling_rope_utils``.

    Args:
        rope_dim: rotated width, even.
    Returns:
        (cos, sin), each [max_positions, rope_dim / 2] fp32.
    """
    assert rope_dim % 2 == 0, f"rope_dim {rope_dim} is odd"
    frequencies = _yarn_frequencies(rope, rope_dim) if rope.rope_type == "yarn" else _frequencies(rope.theta, rope_dim)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return angles.cos().mul_(rope.attention_factor), angles.sin().mul_(rope.attention_factor)


def _frequencies(theta: float, rope_dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim)


def _yarn_frequencies(rope: RopeConfig, rope_dim: int) -> torch.Tensor:
    """Fast dimensions keep their frequency, slow ones are divided by ``factor``, a linear ramp between the two."""

    def dimension_that_turns(rotations: float) -> float:
        period = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope_dim * math.log(period) / (2 * math.log(rope.theta))

    low, high = dimension_that_turns(rope.beta_fast), dimension_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / width).clamp_(0, 1)
    own = _frequencies(rope.theta, rope_dim)
    return own / rope.factor * ramp + own * (1 - ramp)
