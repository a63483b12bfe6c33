"""Slot copies: the whole state of one slot goes to another, for snapshots of linear attention."""

from __future__ import annotations

from sidestream.ops.operator import operator
from sidestream.ops.slot_copy import torch_impl

__all__ = ["copy_slots"]

copy_slots = operator(
    "slot_copy.copy_slots", reads=("source",), writes=("target",), rows={"target": "to", "source": "taken"}
)(torch_impl.copy_slots)
