"""Slot copies in torch: one copy a pair, whatever the number of layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_slots(state: torch.Tensor, *, slots: Sequence[tuple[int, int]]) -> None:
    """Copy ``state[source]`` to ``state[target]`` for each (source, target), one after the other, byte for byte.

    Args:
        state: [S, ...] of any type and stride.
    """
    for source, target in slots:
        state[target].copy_(state[source])
