"""Arguments of ``kda.mixed_step``: decodes and chunks, fresh and continuing, with NaN in all that no row may see."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

from sidestream.core.batch import Split
from sidestream.core.ring import plan_ring
from tests.ops.operator_case import map_tensors

WINDOW = 4


def mixed_step_case(
    starts: Sequence[int],
    lengths: Sequence[int],
    heads: int,
    dim: int,
    *,
    decodes: int = 0,
    padding: int = 0,
    versions: int = 1,
    rollback: int = 0,
    kept: Sequence[Sequence[int]] = (),
    lower_bound: float | None = -5.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> dict[str, Any]:
    """Slots in descending order; ``padding`` rows of NaN behind the sequences'. States kept at positions of each
    sequence go to slots from ``len(starts) + 2`` on."""
    tokens, width, length = sum(lengths), heads * dim, WINDOW - 1 + rollback
    slots = [len(starts) - r for r in range(len(starts))]
    free = count(len(starts) + 2)
    splits = tuple(tuple(Split(position, next(free)) for position in positions) for positions in kept)
    num_slots = next(free)
    plan = plan_ring(starts, lengths, slots, window=WINDOW, ring_length=length)
    state = torch.full((num_slots, versions, heads, dim, dim), torch.nan)
    ring = torch.full((num_slots, length, 3 * width), torch.nan)
    for slot, start in zip(slots, starts, strict=True):
        if start:
            state[slot, start % versions] = torch.randn(heads, dim, dim) * 0.3
        for back in range(1, min(start, WINDOW - 1) + 1):
            ring[slot, (start - back) % length] = torch.randn(3 * width)
    projected = torch.randn(tokens + padding, 3 * width + 2 * dim + heads)
    projected[tokens:] = torch.nan
    arguments = {
        "projected": projected.to(dtype),
        "conv_state": ring.view(-1, 3 * width).to(dtype),
        "state": state,
        "conv_weight": torch.randn(WINDOW, 3 * width).mul(0.5).t(),
        "plan": plan.with_kept(starts, lengths, slots, splits) if splits else plan,
        "expand": torch.randn(2, width, dim).div(dim**0.5).to(dtype),
        "dt_bias": torch.randn(width),
        "A_log": torch.rand(heads) * 1.5 - 1,
        "lower_bound": lower_bound,
        "norm_weight": (torch.rand(dim) + 0.5).to(dtype),
        "norm_eps": 1e-5,
        "slots": torch.tensor(slots),
        "start": torch.tensor(list(starts)),
    }
    moved = map_tensors(arguments, lambda tensor: tensor.to(device))
    host = {"host_slots": slots, "starts": list(starts), "lengths": list(lengths)}
    return {**moved, **host, "decodes": decodes, "kept": splits}
