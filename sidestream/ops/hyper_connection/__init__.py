"""Hyper-connections: several residual streams, collapsed into a sublayer's input and mixed around its output."""

from sidestream.ops.hyper_connection import torch_impl
from sidestream.ops.operator import operator

__all__ = ["hyper_connection_post", "hyper_connection_pre"]

hyper_connection_pre = operator(
    "hyper_connection.hyper_connection_pre", reads=("streams", "fn", "base", "norm_weight")
)(torch_impl.hyper_connection_pre)
hyper_connection_post = operator("hyper_connection.hyper_connection_post", reads=("streams", "output", "post", "mix"))(
    torch_impl.hyper_connection_post
)
