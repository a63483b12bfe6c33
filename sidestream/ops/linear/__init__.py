"""Linear layers: products of a few rows with large weights, which are read at the rate of memory."""

from __future__ import annotations

import torch

from sidestream.ops.linear import torch_impl
from sidestream.ops.linear.launches import launch_for
from sidestream.ops.operator import operator

__all__ = ["linear"]

linear = operator("linear.linear", reads=("x", "weight", "bias"))(torch_impl.linear)


@linear.register("cuda")
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    launch = launch_for(x.shape[0], *weight.shape) if x.is_cuda else None
    if launch is not None:
        from sidestream.ops.linear import triton_linear

        if triton_linear.takes(x, weight, bias):
            return triton_linear.linear(x, weight, bias, launch=launch)
    return torch_impl.linear(x, weight, bias)
