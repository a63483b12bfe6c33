"""Arguments of ``kda.decode_step``: fresh, continuing and padding rows, with NaN in all that no row may see."""

from __future__ import annotations

from typing import Any

import torch

from sidestream.core.ring import plan_ring
from tests.ops.operator_case import map_tensors

WINDOW = 4


def decode_step_case(
    rows: int,
    heads: int,
    dim: int,
    *,
    padding: int = 1,
    versions: int = 1,
    rollback: int = 0,
    bounded: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    spare_slots: int = 3,
) -> dict[str, Any]:
    """Positions 0, 1, 2, 3, .. of the first rows, larger ones behind; the last ``padding`` rows are padding."""
    true, length, width = rows - padding, WINDOW - 1 + rollback, heads * dim
    starts = [r if r < 4 else 7 + 5 * r for r in range(true)] + [0] * padding
    num_slots = true + spare_slots
    slots = [*(torch.randperm(num_slots - 1)[:true] + 1).tolist(), *[0] * padding]
    state = torch.full((num_slots, versions, heads, dim, dim), torch.nan)
    ring = torch.full((num_slots, length, 3 * width), torch.nan)
    for slot, start in zip(slots, starts, strict=True):
        if start:
            state[slot, start % versions] = torch.randn(heads, dim, dim)
        for back in range(1, min(start, WINDOW - 1) + 1):
            ring[slot, (start - back) % length] = torch.randn(3 * width)
    arguments = {
        "projected": torch.randn(rows, 3 * width + 2 * dim + heads).to(dtype),
        "conv_state": ring.view(num_slots * length, 3 * width).to(dtype),
        "state": state,
        "conv_weight": torch.randn(WINDOW, 3 * width).mul(0.5).t(),
        "plan": plan_ring(starts, [1] * rows, slots, window=WINDOW, ring_length=length),
        "expand": torch.randn(2, width, dim).div(dim**0.5).to(dtype),
        "dt_bias": torch.randn(width),
        "A_log": torch.rand(heads) * 1.5 - 1,  # a steep gate would magnify how its input rounds
        "lower_bound": -5.0 if bounded else None,
        "norm_weight": (torch.rand(dim) + 0.5).to(dtype),
        "norm_eps": 1e-5,
        "slots": torch.tensor(slots),
        "start": torch.tensor(starts),
    }
    return map_tensors(arguments, lambda tensor: tensor.to(device))


def owned(state: torch.Tensor, *, length: int = 1) -> torch.Tensor:
    """State or ring rows without those of slot 0, NaN as 7: padding rows write there in any order."""
    return state[length:].float().nan_to_num(7.0)
