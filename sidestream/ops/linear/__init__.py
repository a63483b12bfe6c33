"""Linear layers: products of a few rows with large weights, which are read at the rate of memory."""

from __future__ import annotations

import torch

from sidestream.ops.linear import torch_impl
from sidestream.ops.linear.launches import launch_for, stream_for
from sidestream.ops.operator import operator

__all__ = ["by_head", "by_head_into", "linear", "logits"]

linear = operator("linear.linear", reads=("x", "weight", "bias"))(torch_impl.linear)
logits = operator("linear.logits", reads=("x", "weight"), writes=("out",))(torch_impl.logits)
by_head = operator("linear.by_head", reads=("x", "weight"))(torch_impl.by_head)
by_head_into = operator("linear.by_head_into", reads=("x", "weight"), writes=("out",))(torch_impl.by_head_into)
by_head_into.register("cuda")(torch_impl.write_by_head)


@linear.register("cuda")
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    done = _by_kernel(x, weight, bias) if x.is_cuda else None
    return torch_impl.linear(x, weight, bias) if done is None else done


def _by_kernel(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The product by a kernel, if one is faster than the library and takes it."""
    sizes = (x.shape[0], *weight.shape)
    stream, launch = stream_for(*sizes), launch_for(*sizes)
    if stream is None and launch is None:
        return None
    from sidestream.ops.linear import triton_linear

    if not triton_linear.takes(x, weight, bias):
        return None
    if stream is not None:
        from sidestream.ops.linear import triton_stream

        if triton_stream.takes(x):
            return triton_stream.linear(x, weight, bias, launch=stream, out=out)
    return None if launch is None else triton_linear.linear(x, weight, bias, launch=launch, out=out)


@logits.register("cuda")
def _logits(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> None:
    if not x.is_cuda:
        torch_impl.logits(x, weight, out=out)
        return
    if _by_kernel(x, weight, None, out) is None:
        torch_impl.wide_logits(x, weight, out=out)


@by_head.register("cuda")
def _by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    one_row = x.shape[0] == 1  # which lies in the order of tokens whatever the order of heads
    return torch_impl.by_head(x, weight) if one_row else torch_impl.by_head_in_place(x, weight)
