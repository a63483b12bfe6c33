"""Deterministic top-k."""

from __future__ import annotations

import torch

from sidestream.ops.operator import operator
from sidestream.ops.topk import torch_impl
from sidestream.ops.topk.torch_impl import pick_ascending

__all__ = ["pick_ascending", "topk_ascending"]

topk_ascending = operator("topk.topk_ascending", reads=("scores", "valid"))(torch_impl.topk_ascending)


@topk_ascending.register("cuda")
def _topk_ascending(scores: torch.Tensor, valid: torch.Tensor, k: int) -> torch.Tensor:
    if scores.is_cuda:
        from sidestream.ops.topk import triton_select

        return triton_select.topk_ascending(scores, valid, k)
    return torch_impl.topk_ascending(scores, valid, k)
