"""The experts' weighted sum where it is yet to be made: whoever reads it next may sum on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ExpertSum:
    """What ``experts`` [T, H] is the sum of.

    Attributes:
        partial: [T * (top_k + num_shared), H], contiguous: each pair's result without its weight, numbered as in
            ``triton_grouped``. Rows of pairs without an expert may hold anything.
        weights: [T, top_k] fp32, contiguous.
        ids: [T, top_k] int64, contiguous; -1 takes no expert.
        num_shared: shared experts, added behind the chosen ones.
        dtype: that the sum, made in fp32 in this order, is rounded to.
    """

    partial: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    num_shared: int
    dtype: torch.dtype


def settled(output: torch.Tensor | ExpertSum) -> torch.Tensor:
    """[T, H] with nothing pending."""
    if isinstance(output, torch.Tensor):
        return output
    if output.partial.is_cuda:
        from sidestream.ops.moe import triton_sum

        return triton_sum.summed(output)
    tokens, top_k = output.ids.shape
    hidden = output.partial.shape[1]
    pairs = output.partial.float()
    chosen = pairs[: tokens * top_k].view(tokens, top_k, hidden)
    total = torch.zeros(tokens, hidden, dtype=torch.float32, device=pairs.device)
    for place in range(top_k):
        taken, weight = output.ids[:, place, None] >= 0, output.weights[:, place, None]
        total += torch.where(taken, weight * chosen[:, place], 0.0)
    for first in range(tokens * top_k, pairs.shape[0], tokens):
        total += pairs[first : first + tokens]
    return total.to(output.dtype)
