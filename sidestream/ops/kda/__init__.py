"""Kimi Delta Attention: a whole decode step, a whole step with chunks of prompts in it, and the parts of both."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sidestream.core.ring import RingPlan
from sidestream.ops.kda import decode, mixed, torch_chunked, torch_impl
from sidestream.ops.kda.kept_states import Kept
from sidestream.ops.operator import operator

__all__ = ["chunked", "decode_step", "gate", "mixed_step", "recurrent", "short_conv"]

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
    "kda.chunked", reads=("q", "k", "v", "g", "beta", "state"), writes=("state",), rows={"state": ("slots", "kept")}
)(torch_chunked.chunked)
_STEP = (
    "projected",
    "conv_state",
    "state",
    "conv_weight",
    "plan",
    "expand",
    "dt_bias",
    "A_log",
    "norm_weight",
    "slots",
    "start",
)
decode_step = operator(
    "kda.decode_step",
    reads=_STEP,
    writes=("conv_state", "state"),
    rows={"conv_state": "plan", "state": "slots"},
)(decode.decode_step)
mixed_step = operator(
    "kda.mixed_step",
    reads=_STEP,
    writes=("conv_state", "state"),
    rows={"conv_state": "plan", "state": ("slots", "kept")},
)(mixed.mixed_step)


@short_conv.register("cuda")
def _short_conv(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, *, plan: RingPlan) -> torch.Tensor:
    if x.is_cuda and x.stride(1) == 1:
        from sidestream.ops.kda import triton_conv

        return triton_conv.short_conv(x, state, weight, plan=plan)
    return torch_impl.short_conv(x, state, weight, plan=plan)


@gate.register("cuda")
def _gate(f: torch.Tensor, dt_bias: torch.Tensor, A_log: torch.Tensor, *, lower_bound: float | None) -> torch.Tensor:
    if f.is_cuda and f.stride(1) == 1:
        from sidestream.ops.kda import triton_conv

        return triton_conv.gate(f, dt_bias, A_log, lower_bound=lower_bound)
    return torch_impl.gate(f, dt_bias, A_log, lower_bound=lower_bound)


@recurrent.register("cuda")
def _recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    start: torch.Tensor,
) -> torch.Tensor:
    function = torch_impl.recurrent
    if q.is_cuda:
        from sidestream.ops.kda import triton_recurrent

        if triton_recurrent.takes(q, k, v, state):
            function = triton_recurrent.recurrent
    return function(q, k, v, g=g, beta=beta, state=state, slots=slots, start=start)


@decode_step.register("cuda")
def _decode_step(
    projected: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    *,
    conv_weight: torch.Tensor,
    plan: RingPlan,
    expand: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    lower_bound: float | None,
    norm_weight: torch.Tensor,
    norm_eps: float,
    slots: torch.Tensor,
    start: torch.Tensor,
) -> torch.Tensor:
    function = decode.decode_step
    if projected.is_cuda:
        from sidestream.ops.kda import triton_decode

        if triton_decode.takes(projected, conv_state, state, expand, plan):
            function = triton_decode.decode_step
    return function(
        projected,
        conv_state,
        state,
        conv_weight=conv_weight,
        plan=plan,
        expand=expand,
        dt_bias=dt_bias,
        A_log=A_log,
        lower_bound=lower_bound,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        slots=slots,
        start=start,
    )


@mixed_step.register("cuda")
def _mixed_step(
    projected: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    *,
    conv_weight: torch.Tensor,
    plan: RingPlan,
    expand: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    lower_bound: float | None,
    norm_weight: torch.Tensor,
    norm_eps: float,
    slots: torch.Tensor,
    start: torch.Tensor,
    host_slots: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    decodes: int,
    kept: Kept = (),
    rows: int | None = None,
) -> torch.Tensor:
    function = mixed.mixed_step
    if projected.is_cuda:
        from sidestream.ops.kda import triton_mixed

        if triton_mixed.takes(projected, conv_state, state, expand, plan):
            function = triton_mixed.mixed_step
    return function(
        projected,
        conv_state,
        state,
        conv_weight=conv_weight,
        plan=plan,
        expand=expand,
        dt_bias=dt_bias,
        A_log=A_log,
        lower_bound=lower_bound,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        slots=slots,
        start=start,
        host_slots=host_slots,
        starts=starts,
        lengths=lengths,
        decodes=decodes,
        kept=kept,
        rows=rows,
    )
