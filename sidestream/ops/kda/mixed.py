"""Kimi Delta Attention of a step with chunks of prompts in it, from projected rows to the gated norm, in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sidestream.core.padding import pad_rows, true_rows
from sidestream.core.ring import RingPlan
from sidestream.ops.kda.kept_states import Kept
from sidestream.ops.kda.torch_chunked import chunked
from sidestream.ops.kda.torch_impl import gate, recurrent, short_conv
from sidestream.ops.norm.torch_impl import gated_rms_norm


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
) -> torch.Tensor:
    """Sequences one behind the other: decodes of one length first, one recurrent step each, then chunks of prompts.

    Formula: as of ``decode_step``, which says all arguments that are not named here.

    Args:
        projected: [Tp, 3 * H * D + 2 * D + H]; rows behind the T of the sequences are padding.
        state: [slots, versions, H, D, D] fp32, contiguous: [K, V] of each head.
        plan: of this step, the decodes' sequences included.
        slots, start: [R] int64 on the device; host_slots, starts: the same numbers on the host.
        lengths: tokens of each sequence, >= 1, T together; equal for the first ``decodes``.
        decodes: sequences that continue by a decode, not by a chunk.
        kept: states that each sequence leaves on its way, see ``chunked``; a decode leaves none. Their rings are the
            plan's affair.
        rows: of the result, T at least; None for T.
    Returns:
        [rows, H * D] in the dtype of ``projected``, zeros behind the first T.
    """
    T, heads, dim = sum(lengths), A_log.numel(), expand.shape[2]
    qkv, low, beta = torch.split(projected, [3 * heads * dim, 2 * dim, heads], dim=-1)
    low = low.view(-1, 2, dim).transpose(0, 1)
    forget, output_gate = torch.bmm(low, expand.transpose(1, 2))[:, :T].unbind()
    qkv, beta = true_rows(qkv, T), true_rows(beta, T)
    decay = gate(forget, dt_bias, A_log, lower_bound=lower_bound)
    output_gate = output_gate.view(T, heads, dim)
    beta = beta.sigmoid()
    q, k, v = short_conv(qkv, conv_state, conv_weight, plan=plan).view(T, 3, heads, dim).unbind(1)
    split = decodes * lengths[0] if decodes else 0
    outputs = []
    if decodes:
        shape = (decodes, lengths[0], heads)
        mixed = recurrent(
            q[:split].reshape(*shape, dim),
            k[:split].reshape(*shape, dim),
            v[:split].reshape(*shape, dim),
            g=decay[:split].reshape(*shape, dim),
            beta=beta[:split].reshape(shape),
            state=state,
            slots=slots[:decodes],
            start=start[:decodes],
        )
        outputs.append(mixed.reshape(split, heads, dim))
    if split < T:
        mixed = chunked(
            q[split:],
            k[split:],
            v[split:],
            g=decay[split:],
            beta=beta[split:],
            state=state,
            slots=host_slots[decodes:],
            starts=starts[decodes:],
            lengths=lengths[decodes:],
            kept=kept[decodes:],
        )
        outputs.append(mixed)
    mixed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    normed = gated_rms_norm(mixed, output_gate, norm_weight, eps=norm_eps).reshape(T, -1)
    return pad_rows(normed, T if rows is None else rows)
