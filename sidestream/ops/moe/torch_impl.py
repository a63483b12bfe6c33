"""Router and experts without a host read: one path for one row and for thousands.

Rows are sorted by expert and multiplied by ``grouped_mm``, which visits only the experts that have rows. Measured on a
CPU with 8 experts of 192 x 128 and top-2, it beats products with all experts from 8 rows on, and copies of the chosen
experts' weights at any size.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by biased sigmoid, weigh them by the unbiased one; fp32 whatever ``x`` is.

    Formula: ``*TopkRouter`` of transformers' ``glm5_next``, ``deepseek_v32`` and ``kimi_linear``. Of equal scores the
    lowest expert (or group) id wins, which ``topk`` does not promise.

    Args:
        x: [T, H].
        weight: [E, H] fp32.
        bias: [E] fp32, in the choice only.
        num_groups: E is that many equal groups; the ``topk_groups`` groups with the largest sum of their two best
            biased scores may be chosen from.
        norm_topk_prob: weights of a token sum to ``scale``.
    Returns:
        (weights [T, top_k] fp32, ids [T, top_k] int64), best first.
    """
    scores = F.linear(x.float(), weight).sigmoid_()
    biased = scores + bias
    if topk_groups < num_groups:
        biased = _keep_best_groups(biased, num_groups, topk_groups)
    ids = _descending(biased)[:, :top_k]
    weights = scores.gather(1, ids)
    if norm_topk_prob:
        weights.div_(weights.sum(dim=1, keepdim=True).add_(1e-20))
    return weights.mul_(scale), ids


def _keep_best_groups(biased: torch.Tensor, num_groups: int, topk_groups: int) -> torch.Tensor:
    """-inf in every group [T, E / num_groups] of ``biased`` [T, E] but the best ones of the row."""
    groups = biased.view(biased.shape[0], num_groups, -1)
    worth = groups.topk(min(2, groups.shape[2]), dim=2).values.sum(dim=2)
    kept = _descending(worth)[:, :topk_groups]
    dropped = torch.ones_like(worth, dtype=torch.bool).scatter_(1, kept, False)
    return groups.masked_fill(dropped.unsqueeze(2), float("-inf")).view_as(biased)


def _descending(scores: torch.Tensor) -> torch.Tensor:
    """[T, E] -> column numbers by descending score, equal scores by ascending number."""
    return torch.sort(scores, dim=1, descending=True, stable=True).indices


def experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    weights: torch.Tensor,
    ids: torch.Tensor,
    swiglu_limit: float | None,
) -> torch.Tensor:
    """Weighted sum of each token's experts, in the order of ``ids``, accumulated in fp32.

    Formula: ``*Experts`` of transformers. A token's sum never depends on which experts other tokens chose, but the
    products' rounding may depend on how many rows share an expert, as in any GEMM.

    Args:
        x: [T, H].
        w13: [E, 2I, H], gate rows, then up rows.
        w2: [E, H, I].
        weights: [T, top_k] fp32.
        ids: [T, top_k] int64.
        swiglu_limit: clamps gate from above and up on both sides; None leaves them.
    Returns:
        [T, H] in ``x.dtype``.
    """
    T, H = x.shape
    top_k = ids.shape[1]
    if _fits_grouped_mm(w13) and _fits_grouped_mm(w2):
        expert, order = torch.sort(ids.reshape(-1), stable=True)
        ends = torch.searchsorted(expert, _expert_bounds(w13.shape[0], ids.device), out_int32=True)
        rows = x.index_select(0, order // top_k)
        hidden = swiglu(F.grouped_mm(rows, w13.transpose(1, 2), offs=ends), limit=swiglu_limit)
        by_expert = F.grouped_mm(hidden, w2.transpose(1, 2), offs=ends)
        chosen = torch.empty_like(by_expert).index_copy_(0, order, by_expert).view(T, top_k, H)
    else:
        chosen = _all_experts(x, w13, w2, ids, swiglu_limit)
    return torch.bmm(weights.unsqueeze(1), chosen.float()).view(T, H).to(x.dtype)


def _all_experts(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, swiglu_limit: float | None
) -> torch.Tensor:
    """Every token through every expert, then the chosen [T, top_k, H]: for sizes that ``grouped_mm`` refuses."""
    hidden = swiglu(torch.matmul(x, w13.transpose(1, 2)), limit=swiglu_limit)
    out = torch.matmul(hidden, w2.transpose(1, 2))  # [E, T, H]
    return out.transpose(0, 1).gather(1, ids.unsqueeze(2).expand(-1, -1, out.shape[2]))


def _fits_grouped_mm(weight: torch.Tensor) -> bool:
    """``grouped_mm`` wants every row of a matrix 16 bytes aligned and, but for CPUs, bf16."""
    aligned = weight.shape[2] * weight.element_size() % 16 == 0
    return aligned and (weight.device.type == "cpu" or weight.dtype == torch.bfloat16)


@lru_cache(maxsize=8)
def _expert_bounds(num_experts: int, device: torch.device) -> torch.Tensor:
    """[E] int64: 1 .. E. The rows of expert e end where the first id of e + 1 or more would stand."""
    with torch.inference_mode(False):
        return torch.arange(1, num_experts + 1, device=device)


def swiglu(gate_up: torch.Tensor, *, limit: float | None) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), as ``Glm5NextTextMLP``.

    Args:
        gate_up: [T, 2I], gate then up; strides are free.
        limit: None leaves both as they are.
    Returns:
        [T, I] in ``gate_up.dtype``, new memory.
    """
    if limit is None:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
    low, high = _swiglu_bounds(gate_up.shape[-1], limit, gate_up.dtype, gate_up.device)
    gate, up = torch.clamp(gate_up, min=low, max=high).chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)


@lru_cache(maxsize=8)
def _swiglu_bounds(
    width: int, limit: float, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower bounds [width]: none for the gate half, ``-limit`` for the up half; upper bounds [width]."""
    with torch.inference_mode(False):
        low = torch.full((width,), -limit, dtype=dtype, device=device)
        low[: width // 2] = float("-inf")
        return low, torch.full((width,), limit, dtype=dtype, device=device)
