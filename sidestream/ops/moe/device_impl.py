"""Router, experts and SwiGLU without a host read: for steps that are captured, whatever the router chose.

On a CUDA device, Triton kernels where dtypes and sizes suit them; they are imported when the first such call comes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
import torch.nn.functional as F

from sidestream.ops.decode_groups import scratch_of
from sidestream.ops.moe import torch_impl
from sidestream.ops.moe.expert_sum import ExpertSum
from sidestream.ops.moe.torch_impl import fits_grouped_mm, grouped_experts, swiglu
from sidestream.ops.moe.triton_tiles import MANY_ROWS, ROLES, expert_tiles, router_tiles

SMALLEST_TILE = 32
"""Elements that must divide both sizes of an expert."""
MOST_EXPERTS = 1024
"""What one program of the router compares."""


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    norm_topk_prob: bool,
    scale: float,
    live: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``torch_impl.route`` in two launches. NaN counts as the worst score."""
    suits = x.is_cuda and _one_dtype(torch.float32, weight, bias) and x.dtype in (torch.float32, torch.bfloat16)
    suits = suits and x.shape[0] > 0 and x.stride(1) == 1 and weight.is_contiguous() and bias.is_contiguous()
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch_impl.route
    if suits and weight.shape[0] <= MOST_EXPERTS and x.shape[1] % SMALLEST_TILE == 0:
        from sidestream.ops.moe import triton_route

        run = partial(triton_route.route, tiles=router_tiles(x.shape[0], weight.shape[0], x.dtype))
    return run(
        x,
        weight,
        bias,
        top_k=top_k,
        num_groups=num_groups,
        topk_groups=topk_groups,
        norm_topk_prob=norm_topk_prob,
        scale=scale,
        live=live,
    )


def swiglu_in_one(gate_up: torch.Tensor, *, limit: float | None) -> torch.Tensor:
    """``torch_impl.swiglu``, in one launch and rounded once."""
    known = gate_up.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if not (gate_up.is_cuda and known and gate_up.dim() == 2 and gate_up.numel() > 0):
        return torch_impl.swiglu(gate_up, limit=limit)
    from sidestream.ops.moe import triton_swiglu

    return triton_swiglu.swiglu(gate_up, limit=limit)


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
    """``experts`` on a CUDA device, rows grouped by expert: by Triton, or by ``grouped_mm`` where sizes do not suit
    Triton and it stays on the device; else expert by expert.

    See ``torch_impl.experts`` for the arguments. Which one runs depends on sizes alone.
    """
    if _suits_triton(x, w13, w2):
        from sidestream.ops.moe import triton_grouped, triton_one_token

        tiles = expert_tiles(x.shape[0], ids.shape[1], w13.shape[0] - num_shared)
        if tiles is MANY_ROWS and x.shape[0] > triton_grouped.FP32_PARTIAL_TOKENS and _suits_roles(x, w2):
            tiles = ROLES
        module = triton_one_token if x.shape[0] == 1 else triton_grouped
        run: Callable[..., torch.Tensor] = module.experts
        return run(
            x,
            w13,
            w2,
            weights=weights,
            ids=ids,
            num_shared=num_shared,
            swiglu_limit=swiglu_limit,
            tiles=tiles,
        )
    if not (x.is_cuda and _grouped_on_device(x.device) and fits_grouped_mm(w13)):
        return expert_by_expert(x, w13, w2, weights=weights, ids=ids, num_shared=num_shared, swiglu_limit=swiglu_limit)
    return grouped(x, w13, w2, weights=weights, ids=ids, num_shared=num_shared, swiglu_limit=swiglu_limit)


def unsummed_where_possible(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_shared: int,
    swiglu_limit: float | None,
) -> torch.Tensor | ExpertSum:
    """``grouped_where_possible`` whose sum is left pending where it would be a launch of its own and its terms are few:
    they live until whoever sums them is done. Settled, it has the same bits."""
    if _suits_triton(x, w13, w2):
        from sidestream.ops.moe import triton_grouped

        if 1 < x.shape[0] <= triton_grouped.FP32_PARTIAL_TOKENS:
            return triton_grouped.unsummed(
                x,
                w13,
                w2,
                weights=weights,
                ids=ids,
                num_shared=num_shared,
                swiglu_limit=swiglu_limit,
                tiles=expert_tiles(x.shape[0], ids.shape[1], w13.shape[0] - num_shared),
            )
    return grouped_where_possible(
        x, w13, w2, weights=weights, ids=ids, num_shared=num_shared, swiglu_limit=swiglu_limit
    )


def _suits_triton(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> bool:
    sizes = all(size % SMALLEST_TILE == 0 for size in w2.shape[1:])
    dense = w13.is_contiguous() and w2.is_contiguous() and x.stride(1) == 1
    return x.is_cuda and x.shape[0] > 0 and _one_dtype(torch.bfloat16, x, w13, w2) and sizes and dense


def _suits_roles(x: torch.Tensor, w2: torch.Tensor) -> bool:
    """Whole tiles of 256 weight rows in both products, offsets of 32 bits, a Hopper GPU."""
    _, hidden, inner = w2.shape
    whole = hidden % 256 == 0 and inner % 128 == 0
    return whole and x.shape[0] * x.stride(0) < 2**31 and _is_hopper(w2.device)


def _one_dtype(dtype: torch.dtype, *tensors: torch.Tensor) -> bool:
    return all(tensor.dtype is dtype for tensor in tensors)


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
    """``experts`` with rows sorted by expert (stable) and group ends that stay on the device. Pairs without an expert
    go through the first, whose result means nothing to padding rows."""
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
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=8)
def _grouped_on_device(device: torch.device) -> bool:
    """``grouped_mm`` has kernels for compute capability 9 and 10; elsewhere, and on ROCm, whose numbers collide with
    these, it may read the group ends on the host."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)
