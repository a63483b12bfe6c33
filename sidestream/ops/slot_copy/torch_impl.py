"""Slot copies in torch: one copy a slot and kind of state, whatever the number of layers."""

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
    """Copy slot ``taken[i]`` of each tensor to its slot ``to[i]``, byte for byte and one after the other.

    Args:
        first, second, third: kinds of state, [S, ...] of any type and stride.
    """
    states = [state for state in (first, second, third) if state is not None]
    for place, slot in zip(to, taken, strict=True):
        for state in states:
            state[place].copy_(state[slot])
