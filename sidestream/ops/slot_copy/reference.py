"""Slot copies value by value: the truth."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_slots(
    first: torch.Tensor,
    second: torch.Tensor | None = None,
    third: torch.Tensor | None = None,
    *,
    to: Sequence[int],
    taken: Sequence[int],
) -> None:
    """As the fast path."""
    for state in (first, second, third):
        if state is None:
            continue
        values = state.reshape(state.shape[0], -1).clone()
        for place, slot in zip(to, taken, strict=True):
            for i in range(values.shape[1]):
                values[place, i] = values[slot, i]
        state.copy_(values.view(state.shape))
