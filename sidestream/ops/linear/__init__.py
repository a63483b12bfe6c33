"""Linear layers: products of a few rows with large weights, which are read at the rate of memory."""

from __future__ import annotations

import torch

from sidestream.ops.linear import torch_impl
from sidestream.ops.linear.launches import launch_for
from sidestream.ops.operator import operator

__all__ = ["by_head", "by_head_into", "linear", "logits"]

linear = operator("linear.linear", reads=("x", "weight", "bias"))(torch_impl.linear)
logits = operator("linear.logits", reads=("x", "weight"), writes=("out",))(torch_impl.logits)
by_head = operator("linear.by_head", reads=("x", "weight"))(torch_impl.by_head)
by_head_into = operator("linear.by_head_into", reads=("x", "weight"), writes=("out",))(torch_impl.by_head_into)
by_head_into.register("cuda")(torch_impl.write_by_head)


@linear.register("cuda")
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    launch = launch_for(x.shape[0], *weight.shape) if x.is_cuda else None
    if launch is not None:
        from sidestream.ops.linear import triton_linear

        if triton_linear.takes(x, weight, bias):
            return triton_linear.linear(x, weight, bias, launch=launch)
    return torch_impl.linear(x, weight, bias)


@logits.register("cuda")
def _logits(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> None:
    if not x.is_cuda:
        torch_impl.logits(x, weight, out=out)
        return
    launch = launch_for(x.shape[0], *weight.shape)
    if launch is not None:
        from sidestream.ops.linear import triton_linear

        if triton_linear.takes(x, weight, None):
            triton_linear.linear(x, weight, None, launch=launch, out=out)
            return
    torch_impl.wide_logits(x, weight, out=out)


@by_head.register("cuda")
def _by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    one_row = x.shape[0] == 1  # which lies in the order of tokens whatever the order of heads
    return torch_impl.by_head(x, weight) if one_row else torch_impl.by_head_in_place(x, weight)
