"""The product of a linear layer by torch's library of the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b.

    Args:
        x: [T, K].
        weight: [N, K] in the dtype of x.
        bias: [N], or None.
    Returns:
        [T, N] in the dtype of x. Where the library computes it, a row's last bits may depend on T.
    """
    return torch.mm(x, weight.t()) if bias is None else F.linear(x, weight, bias)


def logits(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> None:
    """out [T, V] fp32, contiguous = x [T, K] through weight [V, K]; rounded to the dtype of x before."""
    if x.dtype == torch.float32:
        torch.mm(x, weight.t(), out=out)
    else:
        out.copy_(torch.mm(x, weight.t()))


def wide_logits(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> None:
    """``logits`` as the product's fp32 sums are: nothing is rounded, and nothing copied."""
    if x.dtype == torch.float32 or not x.shape[0]:
        logits(x, weight, out=out)
    else:
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)


def by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each head's rows through a weight of its own.

    Args:
        x: [T, H, K].
        weight: [H, K, N] in the dtype of x.
    Returns:
        [T, H, N] in the dtype of x; heads may be outermost in memory.
    """
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def by_head_in_place(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``by_head``, contiguous: the product is written where it is read."""
    out = x.new_empty(x.shape[0], weight.shape[0], weight.shape[2])
    write_by_head(x, weight, out=out)
    return out


def by_head_into(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> None:
    """``by_head`` to ``out`` [T, H, N], whose heads may be parts of wider ones."""
    out.copy_(by_head(x, weight))


def write_by_head(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> None:
    """``by_head_into`` without a copy where the library takes strides of its result, as that of a GPU does."""
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
