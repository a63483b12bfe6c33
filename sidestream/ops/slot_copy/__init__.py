"""Slot copies: the whole state of one slot goes to another, for snapshots of linear attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sidestream.ops.operator import operator
from sidestream.ops.slot_copy import torch_impl

__all__ = ["copy_slots"]

_STATES = ("first", "second", "third")

copy_slots = operator(
    "slot_copy.copy_slots", reads=_STATES, writes=_STATES, rows=dict.fromkeys(_STATES, ("to", "taken"))
)(torch_impl.copy_slots)


@copy_slots.register("cuda")
def _copy_slots(
    first: torch.Tensor,
    second: torch.Tensor | None = None,
    third: torch.Tensor | None = None,
    *,
    to: Sequence[int],
    taken: Sequence[int],
) -> None:
    from sidestream.ops.slot_copy import triton_copy

    states = [state for state in (first, second, third) if state is not None]
    if all(state.is_cuda for state in states) and triton_copy.takes(states):
        triton_copy.copy_slots(*states, to=to, taken=taken)
    else:
        torch_impl.copy_slots(first, second, third, to=to, taken=taken)
