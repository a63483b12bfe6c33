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
