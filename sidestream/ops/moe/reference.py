"""Router and experts token by token (``*TopkRouter`` and ``*Experts`` of transformers' ``glm5_next``)."""

from __future__ import annotations

import torch


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
    """Sort every token's experts by (score down, id up). See ``torch_impl.route``."""
    scores = torch.sigmoid(x.float() @ weight.float().T)
    biased = scores + bias.float()
    size = weight.shape[0] // num_groups
    weights = torch.zeros(x.shape[0], top_k)
    ids = torch.zeros(x.shape[0], top_k, dtype=torch.int64)
    for t in range(x.shape[0]):
        row: list[float] = biased[t].tolist()
        groups = [row[g * size : (g + 1) * size] for g in range(num_groups)]
        worth = [torch.tensor(sorted(group)[-2:]).sum().item() for group in groups]
        kept = sorted(range(num_groups), key=lambda g: (-worth[g], g))[:topk_groups]
        candidates = [e for g in kept for e in range(g * size, (g + 1) * size)]
        ids[t] = torch.tensor(sorted(candidates, key=lambda e: (-row[e], e))[:top_k])
        weights[t] = scores[t, ids[t]]
        if norm_topk_prob:
            weights[t] /= weights[t].sum() + 1e-20
        if live is not None and live[t] == 0:
            ids[t] = -1
    return weights * scale, ids


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
    """Each token through each of its experts, and through the shared ones. See ``torch_impl.experts``."""
    first_shared = w13.shape[0] - num_shared
    out = torch.zeros(x.shape, dtype=torch.float32)
    for t in range(x.shape[0]):
        own = [(int(e), float(w)) for e, w in zip(ids[t], weights[t], strict=True)]
        for expert, weight in own + [(first_shared + i, 1.0) for i in range(num_shared)]:
            hidden = swiglu((x[t : t + 1] @ w13[expert].T).float(), limit=swiglu_limit).to(x.dtype)
            out[t] += weight * (hidden @ w2[expert].T)[0].float()
    return out.to(x.dtype)


def swiglu(gate_up: torch.Tensor, *, limit: float | None) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), in fp32. See ``torch_impl.swiglu``."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
