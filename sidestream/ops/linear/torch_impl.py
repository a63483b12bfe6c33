"""The products of linear layers by torch's library of the device."""

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


def per_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product of its own for each head.

    Args:
        x: [T, heads, K].
        weight: [heads, K, N] in the dtype of x.
    Returns:
        [T, heads, N] in the dtype of x; strides are free.
    """
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
