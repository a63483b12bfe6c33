"""Kimi Delta Attention of a step with chunks of prompts in it, on a GPU: decodes as in a decode step, chunks apart.

Floor of the chunks of prompts: q, k, v and both low-rank rows read once and one output written, 66 KB a token at 64
heads of 128: 0.13 ms for 8,192 tokens at 4.28 TB/s. As kernels apart, the convolution moves 98 KB a token, the low-rank
products 33, the chunked product 258 and the norm 48: 0.84 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sidestream.core.padding import true_rows
from sidestream.core.ring import RingPlan
from sidestream.ops.kda import triton_chunked, triton_conv, triton_decode, triton_recurrent
from sidestream.ops.kda.kept_states import Kept
from sidestream.ops.kda.torch_impl import ForgetGate
from sidestream.ops.norm import triton_norms


def takes(
    projected: torch.Tensor, conv_state: torch.Tensor, state: torch.Tensor, expand: torch.Tensor, plan: RingPlan
) -> bool:
    """Whether the kernels run these: what ``triton_decode`` takes."""
    return triton_decode.takes(projected, conv_state, state, expand, plan)


def mixed_step(
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
    walk: bool | None = None,
    launch: triton_chunked.Launch | None = None,
) -> torch.Tensor:
    """As ``mixed.mixed_step``; for what ``takes`` allows. Decodes of one token are those of a decode step. ``walk`` is
    for ``triton_conv.heads_conv``, ``launch`` for ``triton_chunked.chunked``."""
    T, heads, dim = sum(lengths), A_log.numel(), expand.shape[2]
    width = heads * dim
    alone = decodes if decodes and lengths[0] == 1 else 0
    out = torch.empty(T if rows is None else rows, width, dtype=projected.dtype, device=projected.device)
    if alone:
        triton_decode.decode_step(
            projected[:alone],
            conv_state,
            state,
            conv_weight=conv_weight,
            plan=_of_decodes(plan, alone),
            expand=expand,
            dt_bias=dt_bias,
            A_log=A_log,
            lower_bound=lower_bound,
            norm_weight=norm_weight,
            norm_eps=norm_eps,
            slots=slots[:alone],
            start=start[:alone],
            out=out[:alone],
        )
    if alone < T:
        qkv = true_rows(projected, T)[:, : 3 * width]
        q, k, v = triton_conv.heads_conv(
            qkv, conv_state, conv_weight, plan=plan, tokens=T, first=alone, dim=dim, walk=walk
        ).unbind(0)
        low = projected[alone:T, 3 * width : 3 * width + 2 * dim].view(-1, 2, dim).transpose(0, 1)
        forget, output_gate = torch.bmm(low, expand.transpose(1, 2)).view(2, -1, heads, dim).unbind(0)
        beta = projected[alone:T, 3 * width + 2 * dim :]
        gate = ForgetGate(dt_bias, A_log, lower_bound)
        parts = []
        split = (decodes - alone) * lengths[0]
        if split:
            parts.append(
                _verified(
                    (q[:split], k[:split], v[:split], forget[:split], beta[:split]),
                    gate=gate,
                    state=state,
                    slots=slots[:decodes],
                    start=start[:decodes],
                )
            )
        if alone + split < T:
            parts.append(
                triton_chunked.chunked(
                    q[split:],
                    k[split:],
                    v[split:],
                    forget=forget[split:],
                    beta=beta[split:],
                    gate=gate,
                    state=state,
                    slots=host_slots[decodes:],
                    starts=starts[decodes:],
                    lengths=lengths[decodes:],
                    kept=kept[decodes:],
                    launch=launch,
                )
            )
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        normed = out[alone:T].view(-1, heads, dim)
        triton_norms.gated_rms_norm(mixed, output_gate, norm_weight, eps=norm_eps, out=normed)
    if out.shape[0] > T:
        out[T:].zero_()
    return out


def _decay(forget: torch.Tensor, gate: ForgetGate) -> torch.Tensor:
    return triton_conv.gate(forget.flatten(1), gate.dt_bias, gate.A_log, lower_bound=gate.lower_bound)


def _verified(
    tokens: tuple[torch.Tensor, ...],
    *,
    gate: ForgetGate,
    state: torch.Tensor,
    slots: torch.Tensor,
    start: torch.Tensor,
) -> torch.Tensor:
    """Decodes of several tokens each: the recurrent step. q, k, v, forget, beta of all -> [tokens, H, V]."""
    requests, decay = slots.shape[0], _decay(tokens[3], gate)
    flat = (*tokens[:3], decay, tokens[4].float().sigmoid())
    q, k, v, g, beta = (x.reshape(requests, -1, *x.shape[1:]) for x in flat)
    mixed = triton_recurrent.recurrent(q, k, v, g=g, beta=beta, state=state, slots=slots, start=start)
    return mixed.flatten(0, 1)


def _of_decodes(plan: RingPlan, rows: int) -> RingPlan:
    """The part of a step's plan that its first ``rows`` sequences, of one token each, have in ``decode_step``."""
    carried = rows * (plan.window - 1)
    return plan.moved(
        (plan.carry_rows[:carried], plan.window_rows[:rows], plan.keep_tokens[:rows], plan.keep_rows[:rows])
    )
