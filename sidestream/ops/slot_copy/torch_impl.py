"""Slot copies in torch: one copy a slot, whatever the number of layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_slots(target: torch.Tensor, source: torch.Tensor, *, to: Sequence[int], taken: Sequence[int]) -> None:
    """Copy ``source[taken[i]]`` to ``target[to[i]]``, byte for byte and one after the other.

    Args:
        target, source: [S, ...] of one type and any stride; they may be the same tensor.
    """
    for place, slot in zip(to, taken, strict=True):
        target[place].copy_(source[slot])
