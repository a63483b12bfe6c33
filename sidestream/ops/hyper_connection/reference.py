"""Hyper-connections as their formulas read (``Glm5NextTextHyperConnection``; mHC, Xie et al. 2026, section 2.2)."""

from __future__ import annotations

import torch

from sidestream.ops.norm.reference import rms_norm


def hyper_connection_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_weight: torch.Tensor,
    norm_eps: float,
    eps: float,
    iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights from all streams together, the collapse, its norm. See ``torch_impl.hyper_connection_pre``."""
    T, S, H = streams.shape
    wide = streams.float()
    flat = wide.reshape(T, S * H)
    flat = flat / torch.sqrt((flat * flat).mean(-1, keepdim=True) + norm_eps)
    logits = flat @ fn.float().T + base
    pre = torch.sigmoid(logits[:, :S]) + eps
    post = torch.sigmoid(logits[:, S : 2 * S])
    comb = torch.softmax(logits[:, 2 * S :].reshape(T, S, S), dim=-1) + eps
    for half in range(2 * iters - 1):  # columns first and last
        dim = 1 if half % 2 == 0 else 2
        comb = comb / (comb.sum(dim=dim, keepdim=True) + eps)
    collapsed = torch.einsum("ts,tsh->th", pre, wide).to(streams.dtype)
    return rms_norm(collapsed, norm_weight[0], norm_eps), post.unsqueeze(2), comb.transpose(1, 2)


def hyper_connection_post(
    streams: torch.Tensor, output: torch.Tensor, post: torch.Tensor, *, mix: torch.Tensor
) -> torch.Tensor:
    """Stream j takes its share of the output and row j of the mix. See ``torch_impl.hyper_connection_post``."""
    mixed = torch.einsum("tji,tih->tjh", mix.to(streams.dtype).float(), streams.float())
    placed = 2 * torch.einsum("tjo,th->tjh", post.to(streams.dtype).float(), output.float())
    return (mixed + placed).to(streams.dtype)


def hyper_connection_post_pre(
    streams: torch.Tensor,
    output: torch.Tensor,
    post: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    *,
    mix: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    eps: float,
    iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One after the other. See ``torch_impl.hyper_connection_post_pre``."""
    new = hyper_connection_post(streams, output, post, mix=mix)
    return (
        new,
        *hyper_connection_pre(new, fn, base, norm_weight=norm_weight, norm_eps=norm_eps, eps=eps, iters=iters),
    )
