"""The product of a linear layer, in fp32: the truth."""

from __future__ import annotations

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] through weight [N, K], plus bias [N]: [T, N] fp32, nothing rounded."""
    product = x.float() @ weight.float().T
    return product if bias is None else product + bias.float()


def by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H, K] through weight [H, K, N]: [T, H, N] fp32, nothing rounded."""
    return torch.stack([x[:, head].float() @ weight[head].float() for head in range(weight.shape[0])], dim=1)
