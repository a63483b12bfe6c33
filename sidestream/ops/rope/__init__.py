"""Rotary position embedding: the table of a model and the rotation, for both ways of pairing dimensions."""

from sidestream.ops.operator import operator
from sidestream.ops.rope import torch_impl, triton_launch
from sidestream.ops.rope.table import rope_table

__all__ = ["apply_rope", "apply_rope_pair", "rope_table"]

apply_rope = operator("rope.apply_rope", reads=("x", "cos", "sin"))(torch_impl.apply_rope)
apply_rope.register("cuda")(triton_launch.apply_rope)
apply_rope_pair = operator("rope.apply_rope_pair", reads=("query", "key", "cos", "sin"), writes=("out",))(
    torch_impl.apply_rope_pair
)
apply_rope_pair.register("cuda")(triton_launch.apply_rope_pair)
