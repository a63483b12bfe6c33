"""Router and experts: rows are sorted by expert, and each expert multiplies its own.

Many rows go through ``grouped_mm``, without a host read. Measured on a CPU with 8 experts of 192 x 128 and top-2, it
beats products with all experts from 8 rows on, and copies of the chosen experts' weights at any size. It spends 10 us
on every expert, though, chosen or not; so few rows on a CPU, where ids are on the host anyway, are grouped by numpy
and visit the chosen experts alone. Where these rows are about as many as experts, most experts are visited anyway, and
one batched product with all of them is as fast in one thread and twice as fast in two: threads share a batch, but gain
nothing in a product of two rows. (One product with the experts' rows stacked, instead of a batch, was slower.)
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from sidestream.ops.constants import constant
from sidestream.ops.moe.expert_sum import ExpertSum

FEW_ROWS = 64
"""Pairs of token and expert up to which the host groups them."""
DENSE_PAIRS = (1, 4)
"""Pairs an expert, from and to, between which every token goes through every expert."""
_grouped_mm = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm


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
        live: [T] int64, 0 in padding rows, which choose no expert; None where all rows are tokens.
    Returns:
        (weights [T, top_k] fp32, ids [T, top_k] int64), best first; ids of padding rows are -1, their weights mean
        nothing.
    """
    weights, ids = _choose(x, weight, bias, top_k, num_groups, topk_groups, norm_topk_prob, scale)
    return weights, ids if live is None else ids.masked_fill(live.unsqueeze(1) == 0, -1)


def _choose(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    norm_topk_prob: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``route`` as if every row were a token."""
    scores = F.linear(x.float(), weight).sigmoid_()
    if _few(x, top_k) and topk_groups == num_groups:
        return _choose_numpy(scores, bias, top_k, norm_topk_prob, scale)
    biased = scores + bias
    if topk_groups < num_groups:
        biased = _keep_best_groups(biased, num_groups, topk_groups)
    ids = _descending(biased)[:, :top_k]
    weights = scores.gather(1, ids)
    if norm_topk_prob:
        weights.div_(weights.sum(dim=1, keepdim=True).add_(1e-20))
    return weights.mul_(scale), ids


def _few(x: torch.Tensor, top_k: int) -> bool:
    return x.device.type == "cpu" and 0 < x.shape[0] * top_k <= FEW_ROWS


def _choose_numpy(
    scores: torch.Tensor, bias: torch.Tensor, top_k: int, norm_topk_prob: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``route`` behind the scores [T, E], for one group of experts."""
    T, E = scores.shape
    unbiased = scores.numpy()
    worst_first = np.add(unbiased, bias.numpy())
    np.negative(worst_first, worst_first)
    ids = worst_first.argsort(axis=1, kind="stable")[:, :top_k]  # NaN comes last
    picked = unbiased.ravel().take(ids + np.arange(0, T * E, E)[:, None])
    if norm_topk_prob:
        total = np.add.reduce(picked, axis=1, keepdims=True)
        np.add(total, np.float32(1e-20), total)
        np.divide(picked, total, picked)
    weights = torch.empty(T, top_k)
    np.multiply(picked, np.float32(scale), weights.numpy())
    return weights, torch.from_numpy(np.ascontiguousarray(ids))


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
    num_shared: int,
    swiglu_limit: float | None,
) -> torch.Tensor:
    """The shared experts' sum plus the weighted sum of each token's own, accumulated in fp32.

    Formula: ``*MoE`` and ``*Experts`` of transformers. A token's sum never depends on which experts other tokens chose,
    but the products' rounding may depend on how many rows share an expert, as in any GEMM. Experts that nobody chose
    may be read, times zero.

    Args:
        x: [T, H].
        w13: [E + num_shared, 2I, H], gate rows, then up rows.
        w2: [E + num_shared, H, I].
        weights: [T, top_k] fp32.
        ids: [T, top_k] int64, below E, distinct in a row.
        num_shared: the last experts, which every token takes with weight 1. (A shared expert n times as wide is n.)
        swiglu_limit: clamps gate from above and up on both sides; None leaves them.
    Returns:
        [T, H] in ``x.dtype``.
    """
    num_experts = w13.shape[0] - num_shared
    if _few(x, ids.shape[1]):
        least, most = DENSE_PAIRS
        if x.dtype is torch.float32 and least * num_experts <= ids.numel() <= most * num_experts:
            return _dense_experts(x, w13, w2, _dense_weights(weights, ids, num_experts, num_shared), swiglu_limit)
        chosen, shared = _few_experts(x, w13, w2, ids, num_experts, swiglu_limit)
    else:
        own13, own2 = w13[:num_experts], w2[:num_experts]
        chosen = (grouped_experts if fits_grouped_mm(w13) else _all_experts)(x, own13, own2, ids, swiglu_limit)
        shared = _sum_of_all(x, w13[num_experts:], w2[num_experts:], swiglu_limit)
    summed = torch.baddbmm(shared.float().unsqueeze(1), weights.unsqueeze(1), chosen.float())
    return summed.squeeze(1).to(x.dtype)


def unsummed_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_shared: int,
    swiglu_limit: float | None,
) -> torch.Tensor | ExpertSum:
    """``experts``, whose sum may be left to whoever reads it: one for which ``expert_sum.settled`` knows what to do.

    Here it never is.
    """
    return experts(x, w13, w2, weights=weights, ids=ids, num_shared=num_shared, swiglu_limit=swiglu_limit)


def _sum_of_all(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, swiglu_limit: float | None) -> torch.Tensor:
    """[T, H]: all experts' results, summed by the second product itself."""
    T, H = x.shape
    num_experts, width, _ = w13.shape
    hidden = swiglu(F.linear(x, w13.view(-1, H)).view(T, num_experts, width), limit=swiglu_limit)
    return torch.mm(hidden.reshape(T, num_experts * width // 2), w2.transpose(1, 2).reshape(-1, H))


def _dense_experts(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, swiglu_limit: float | None
) -> torch.Tensor:
    """Every token through every expert, times ``weights`` [E, T, 1]: two batched products, which threads share."""
    gate_up = torch.bmm(x.expand(w13.shape[0], -1, -1), w13.transpose(1, 2))
    hidden = swiglu(gate_up, limit=swiglu_limit) * weights
    return torch.bmm(hidden, w2.transpose(1, 2)).sum(dim=0)


def _dense_weights(weights: torch.Tensor, ids: torch.Tensor, num_experts: int, num_shared: int) -> torch.Tensor:
    """[E + num_shared, T, 1]: the weight of every expert, 0 where it was not chosen. On a CPU."""
    T = ids.shape[0]
    dense = torch.zeros(num_experts + num_shared, T, 1)
    values = dense.numpy()
    values[num_experts:] = 1.0
    values.reshape(-1)[ids.numpy() * T + np.arange(T)[:, None]] = weights.numpy()
    return dense


def _few_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    swiglu_limit: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chosen [T, top_k, H] and shared [T, H], one product an expert that has rows."""
    T, top_k = ids.shape
    shared = range(num_experts, w13.shape[0])
    if T == 1:
        order, names, sizes = None, ids.numpy()[0].tolist(), [1] * top_k
        rows = [x] * top_k
    else:
        by_pair = ids.numpy().ravel()
        order = by_pair.argsort(kind="stable")
        counts = np.bincount(by_pair, minlength=num_experts)
        names = np.flatnonzero(counts).tolist()
        sizes = counts[names].tolist()
        rows = list(torch.split(x.index_select(0, torch.from_numpy(order // top_k)), sizes))
    names += shared
    sizes += [T] * len(shared)
    rows += [x] * len(shared)
    # All views at once are cheaper than most of them one by one.
    most = 2 * len(names) > w13.shape[0]
    of13, of2 = (w13.unbind(), w2.unbind()) if most else (w13, w2)
    gate_up = torch.cat([F.linear(part, of13[name]) for part, name in zip(rows, names, strict=True)])
    hidden = torch.split(swiglu(gate_up, limit=swiglu_limit), sizes)
    out = torch.cat([F.linear(part, of2[name]) for part, name in zip(hidden, names, strict=True)])
    chosen, common = torch.split(out, [T * top_k, T * len(shared)])
    if order is not None:
        place = np.empty_like(order)
        place[order] = np.arange(T * top_k)
        chosen = chosen.index_select(0, torch.from_numpy(place))
    if len(shared) != 1:
        common = common.view(-1, T, x.shape[1]).sum(dim=0)
    return chosen.view(T, top_k, -1), common


def grouped_experts(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, swiglu_limit: float | None
) -> torch.Tensor:
    """Chosen [T, top_k, H] by ``grouped_mm``."""
    T, top_k = ids.shape
    expert, order = torch.sort(ids.reshape(-1), stable=True)
    ends = torch.searchsorted(expert, _expert_bounds(ids, w13.shape[0]), out_int32=True)
    rows = x.index_select(0, order // top_k)
    hidden = swiglu(_grouped_mm(rows, w13.transpose(1, 2), offs=ends), limit=swiglu_limit)
    by_expert = _grouped_mm(hidden, w2.transpose(1, 2), offs=ends)
    return torch.empty_like(by_expert).index_copy_(0, order, by_expert).view(T, top_k, x.shape[1])


def _all_experts(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, swiglu_limit: float | None
) -> torch.Tensor:
    """Every token through every expert, then the chosen [T, top_k, H]: for sizes that ``grouped_mm`` refuses."""
    hidden = swiglu(torch.matmul(x, w13.transpose(1, 2)), limit=swiglu_limit)
    out = torch.matmul(hidden, w2.transpose(1, 2))  # [E, T, H]
    return out.transpose(0, 1).gather(1, ids.unsqueeze(2).expand(-1, -1, out.shape[2]))


def fits_grouped_mm(w13: torch.Tensor) -> bool:
    """``grouped_mm`` wants every row of a matrix 16 bytes aligned and, but for CPUs, bf16."""
    _, width, hidden = w13.shape
    aligned = all(size * w13.element_size() % 16 == 0 for size in (hidden, width // 2))
    return aligned and (w13.device.type == "cpu" or w13.dtype == torch.bfloat16)


@constant
def _expert_bounds(device: torch.device, num_experts: int) -> torch.Tensor:
    """[E] int64: 1 .. E. The rows of expert e end where the first id of e + 1 or more would stand."""
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
    low, high = _swiglu_bounds(gate_up, gate_up.shape[-1], limit, gate_up.dtype)
    gate, up = torch.clamp(gate_up, min=low, max=high).chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)


@constant
def _swiglu_bounds(
    device: torch.device, width: int, limit: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower bounds [width]: none for the gate half, ``-limit`` for the up half; upper bounds [width]."""
    low = torch.full((width,), -limit, dtype=dtype, device=device)
    low[: width // 2].fill_(float("-inf"))
    return low, torch.full((width,), limit, dtype=dtype, device=device)
