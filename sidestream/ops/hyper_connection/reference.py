"""Hyper-connections as their formulas read (``Glm5NextTextHyperConnection``; mHC, Xie et al. 2026, section 2.2)."""

from __future__ import annotations

import torch


def hyper_connection_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    *,
    scale: torch.Tensor,
    norm_eps: float,
    eps: float,
    iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights from all streams together, then the collapse. See ``torch_impl.hyper_connection_pre``."""
    T, S, H = streams.shape
    wide = streams.float()
    flat = wide.reshape(T, S * H)
    flat = flat / torch.sqrt((flat * flat).mean(-1, keepdim=True) + norm_eps)
    mix = flat @ fn.float().T
    pre = torch.sigmoid(mix[:, :S] * scale[0] + base[:S]) + eps
    post = 2 * torch.sigmoid(mix[:, S : 2 * S] * scale[1] + base[S : 2 * S])
    comb = torch.softmax((mix[:, 2 * S :] * scale[2] + base[2 * S :]).reshape(T, S, S), dim=-1) + eps
    for half in range(2 * iters - 1):  # columns first and last
        dim = 1 if half % 2 == 0 else 2
        comb = comb / (comb.sum(dim=dim, keepdim=True) + eps)
    collapsed = torch.einsum("ts,tsh->th", pre, wide).to(streams.dtype)
    return collapsed, post, comb


def hyper_connection_post(
    streams: torch.Tensor, output: torch.Tensor, post: torch.Tensor, *, comb: torch.Tensor
) -> torch.Tensor:
    """Stream j takes its share of the output and column j of the mix. See ``torch_impl.hyper_connection_post``."""
    mixed = torch.einsum("tij,tih->tjh", comb.to(streams.dtype).float(), streams.float())
    placed = torch.einsum("tj,th->tjh", post.to(streams.dtype).float(), output.float())
    return (mixed + placed).to(streams.dtype)
