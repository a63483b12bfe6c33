"""Deterministic top-k."""

from __future__ import annotations

from sidestream.ops.operator import operator
from sidestream.ops.topk import torch_impl
from sidestream.ops.topk.torch_impl import pick_ascending

__all__ = ["pick_ascending", "topk_ascending"]

topk_ascending = operator("topk.topk_ascending", reads=("scores", "valid"))(torch_impl.topk_ascending)
