"""Experts without a host read: for steps that are captured, whatever the router chose."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from sidestream.ops.decode_groups import scratch_of
from sidestream.ops.moe.torch_impl import fits_grouped_mm, grouped_experts, swiglu


def grouped_where_possible(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_shared: int,
    swiglu_limit: float | None,
) -> torch.Tensor:
    """``experts`` on a CUDA device: by ``grouped_mm`` where that stays on the device, else expert by expert.

    See ``torch_impl.experts`` for the arguments.
    """
    if not (x.is_cuda and _grouped_on_device(x.device) and fits_grouped_mm(w13)):
        return expert_by_expert(x, w13, w2, weights=weights, ids=ids, num_shared=num_shared, swiglu_limit=swiglu_limit)
    return grouped(x, w13, w2, weights=weights, ids=ids, num_shared=num_shared, swiglu_limit=swiglu_limit)


def grouped(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_shared: int,
    swiglu_limit: float | None,
) -> torch.Tensor:
    """``experts`` with rows sorted by expert (stable) and group ends that stay on the device."""
    num_experts = w13.shape[0] - num_shared
    chosen = grouped_experts(x, w13[:num_experts], w2[:num_experts], ids, swiglu_limit)
    total = weighted_sum(chosen, weights, scratch_bytes=scratch_of(x, None))
    for expert in range(num_experts, w13.shape[0]):
        total += _through(x, w13[expert], w2[expert], swiglu_limit)
    return total.to(x.dtype)


def weighted_sum(chosen: torch.Tensor, weights: torch.Tensor, *, scratch_bytes: int) -> torch.Tensor:
    """[T, H] fp32 from chosen [T, top_k, H] and weights [T, top_k] fp32; ``scratch_bytes`` bound the fp32 copies."""
    tokens, top_k, hidden = chosen.shape
    total = torch.empty(tokens, hidden, dtype=torch.float32, device=chosen.device)
    run = max(1, scratch_bytes // (4 * top_k * hidden))
    for first in range(0, tokens, run):
        part = slice(first, first + run)
        total[part] = torch.bmm(weights[part].unsqueeze(1), chosen[part].float()).squeeze(1)
    return total


def expert_by_expert(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_shared: int,
    swiglu_limit: float | None,
) -> torch.Tensor:
    """``experts`` with every row through every expert, in the order of the experts.

    Simple and slow. A row's bits depend on the row and on how many rows there are, never on what the others chose. A
    result that was not chosen is replaced by zero rather than multiplied by it, since it may have overflowed.
    """
    num_experts = w13.shape[0] - num_shared
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(w13.shape[0]):
        result = _through(x, w13[expert], w2[expert], swiglu_limit).float()
        if expert < num_experts:
            mine = ids == expert
            weight = torch.where(mine, weights, 0.0).sum(dim=1, keepdim=True)
            result = torch.where(mine.any(dim=1, keepdim=True), result * weight, 0.0)
        total += result
    return total.to(x.dtype)


def _through(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, swiglu_limit: float | None) -> torch.Tensor:
    """All rows [T, H] through one expert."""
    return F.linear(swiglu(F.linear(x, w13), limit=swiglu_limit), w2)


@lru_cache(maxsize=8)
def _grouped_on_device(device: torch.device) -> bool:
    """``grouped_mm`` has kernels for compute capability 9 and 10; elsewhere, and on ROCm, whose numbers collide with
    these, it may read the group ends on the host."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)
