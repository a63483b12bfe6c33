"""Kimi Delta Attention: short convolution, log decay, one recurrent step, and chunks of a prefill."""

from sidestream.ops.kda import torch_chunked, torch_impl
from sidestream.ops.operator import operator

__all__ = ["chunked", "gate", "recurrent", "short_conv"]

short_conv = operator(
    "kda.short_conv", reads=("x", "state", "weight", "plan"), writes=("state",), rows={"state": "plan"}
)(torch_impl.short_conv)
gate = operator("kda.gate", reads=("f", "dt_bias", "A_log"))(torch_impl.gate)
recurrent = operator(
    "kda.recurrent",
    reads=("q", "k", "v", "g", "beta", "state", "slots", "start"),
    writes=("state",),
    rows={"state": "slots"},
)(torch_impl.recurrent)
chunked = operator(
    "kda.chunked", reads=("q", "k", "v", "g", "beta", "state"), writes=("state",), rows={"state": "slots"}
)(torch_chunked.chunked)
