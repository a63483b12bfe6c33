"""Rotary angles of a step's positions, looked up once for all layers."""

from __future__ import annotations

import torch

from sidestream.config.model import MlaConfig
from sidestream.ops.rope import rope_table

Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each [T, p / 2] fp32."""


class Rope:
    """Tables of cos and sin for every position the engine may serve."""

    def __init__(self, mla: MlaConfig, max_positions: int, device: torch.device) -> None:
        assert mla.rope is not None
        cos, sin = rope_table(mla.rope, mla.qk_rope_head_dim, max_positions)
        self.angles = torch.cat((cos, sin), dim=1).to(device)  # side by side: one launch looks up both

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """positions [T] int64 -> cos, sin [T, p / 2], halves of one tensor."""
        cos, sin = self.angles.index_select(0, positions).chunk(2, dim=1)
        return cos, sin
