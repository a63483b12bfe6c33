"""Norms: RMS norm, layer norm, and the gated RMS norm behind linear attention."""

from __future__ import annotations

import torch

from sidestream.ops.norm import torch_impl
from sidestream.ops.operator import operator

__all__ = ["add_rms_norm", "gated_rms_norm", "layer_norm", "mean_rms_norm", "rms_norm", "rms_norm_pair"]

rms_norm = operator("norm.rms_norm", reads=("x", "weight"))(torch_impl.rms_norm)
add_rms_norm = operator("norm.add_rms_norm", reads=("x", "output", "weight"))(torch_impl.add_rms_norm)
rms_norm_pair = operator("norm.rms_norm_pair", reads=("x", "other", "weight", "other_weight"))(torch_impl.rms_norm_pair)
mean_rms_norm = operator("norm.mean_rms_norm", reads=("streams", "weight"))(torch_impl.mean_rms_norm)
layer_norm = operator("norm.layer_norm", reads=("x", "weight", "bias"))(torch_impl.layer_norm)
gated_rms_norm = operator("norm.gated_rms_norm", reads=("x", "gate", "weight"))(torch_impl.gated_rms_norm)


@rms_norm.register("cuda")
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.is_cuda:
        from sidestream.ops.norm import triton_norms

        if triton_norms.takes(x, weight):
            return triton_norms.rms_norm(x, weight, eps)
    return torch_impl.rms_norm(x, weight, eps)


@add_rms_norm.register("cuda")
def _add_rms_norm(
    x: torch.Tensor, output: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.is_cuda:
        from sidestream.ops.norm import triton_norms

        if x.dim() == 2 and triton_norms.takes(x, output, weight):
            return triton_norms.add_rms_norm(x, output, weight, eps)
    return torch_impl.add_rms_norm(x, output, weight, eps)


@rms_norm_pair.register("cuda")
def _rms_norm_pair(
    x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, other_weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.is_cuda:
        from sidestream.ops.norm import triton_norms

        few = x.dim() == other.dim() == 2 and max(len(x), len(other)) <= triton_norms.PAIRED_ROWS
        if few and triton_norms.takes(x, weight, other, other_weight):
            return triton_norms.rms_norm_pair(x, other, weight, other_weight, eps=eps)
    return _rms_norm(x, weight, eps), _rms_norm(other, other_weight, eps)


@mean_rms_norm.register("cuda")
def _mean_rms_norm(streams: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if streams.is_cuda:
        from sidestream.ops.norm import triton_norms

        if triton_norms.takes(streams, weight):
            return triton_norms.mean_rms_norm(streams, weight, eps)
    return _rms_norm(streams.mean(dim=1), weight, eps)


@layer_norm.register("cuda")
def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float) -> torch.Tensor:
    if x.is_cuda:
        from sidestream.ops.norm import triton_norms

        if triton_norms.takes(x, weight, bias):
            return triton_norms.layer_norm(x, weight, bias, eps=eps)
    return torch_impl.layer_norm(x, weight, bias, eps=eps)


@gated_rms_norm.register("cuda")
def _gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    if x.is_cuda:
        from sidestream.ops.norm import triton_norms

        if triton_norms.takes(x, gate, weight) and gate.dim() == x.dim():
            return triton_norms.gated_rms_norm(x, gate, weight, eps=eps)
    return torch_impl.gated_rms_norm(x, gate, weight, eps=eps)
