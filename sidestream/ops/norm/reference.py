"""Norms as their formulas read, in fp32 (``*RMSNorm``, ``*RMSNormGated`` of transformers' ``glm5_next``)."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise in fp32, round to ``x.dtype``, then scale. See ``torch_impl.rms_norm``."""
    wide = x.float()
    normed = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, output: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add in fp32, round, then normalise. See ``torch_impl.add_rms_norm``."""
    total = (x.float() + output.float()).to(x.dtype)
    return total, rms_norm(total, weight, eps)


def rms_norm_pair(
    x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, other_weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One, then the other. See ``torch_impl.rms_norm_pair``."""
    return rms_norm(x, weight, eps), rms_norm(other, other_weight, eps)


def mean_rms_norm(streams: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Average in fp32, round, then normalise. See ``torch_impl.mean_rms_norm``."""
    return rms_norm(streams.float().mean(1).to(streams.dtype), weight, eps)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Centre, normalise and scale in fp32, rounding once. See ``torch_impl.layer_norm``."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps)
    return (normed * weight.float() + bias.float()).to(x.dtype)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Normalise, scale and gate in fp32, rounding once. See ``torch_impl.gated_rms_norm``."""
    wide = x.float()
    normed = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (normed * weight.float() / (1 + torch.exp(-gate.float()))).to(x.dtype)
