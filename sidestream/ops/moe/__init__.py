"""Mixture of experts: the router's choice, the chosen experts' sum, and the clamped SwiGLU between their products."""

from sidestream.ops.moe import device_impl, torch_impl
from sidestream.ops.moe.expert_sum import ExpertSum, settled
from sidestream.ops.operator import operator

__all__ = ["ExpertSum", "experts", "route", "settled", "swiglu", "unsummed_experts"]

route = operator("moe.route", reads=("x", "weight", "bias", "live"))(torch_impl.route)
route.register("cuda")(device_impl.route)
experts = operator(
    "moe.experts",
    reads=("x", "w13", "w2", "weights", "ids"),
)(torch_impl.experts)
experts.register("cuda")(device_impl.grouped_where_possible)
experts.register("sim")(device_impl.expert_by_expert)
unsummed_experts = operator(
    "moe.unsummed_experts",
    reads=("x", "w13", "w2", "weights", "ids"),
)(torch_impl.unsummed_experts)
unsummed_experts.register("cuda")(device_impl.unsummed_where_possible)
unsummed_experts.register("sim")(device_impl.expert_by_expert)
swiglu = operator("moe.swiglu", reads=("gate_up",))(torch_impl.swiglu)
swiglu.register("cuda")(device_impl.swiglu_in_one)
