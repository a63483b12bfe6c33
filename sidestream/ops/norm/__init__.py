"""Norms: RMS norm, layer norm, and the gated RMS norm behind linear attention."""

from sidestream.ops.norm import torch_impl
from sidestream.ops.operator import operator

__all__ = ["gated_rms_norm", "layer_norm", "rms_norm"]

rms_norm = operator("norm.rms_norm", reads=("x", "weight"))(torch_impl.rms_norm)
layer_norm = operator("norm.layer_norm", reads=("x", "weight", "bias"))(torch_impl.layer_norm)
gated_rms_norm = operator("norm.gated_rms_norm", reads=("x", "gate", "weight"))(torch_impl.gated_rms_norm)
