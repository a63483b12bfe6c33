"""One decode step of Kimi Delta Attention from the projected row to the gated norm, composed of torch operators."""

from __future__ import annotations

import torch

from sidestream.core.ring import RingPlan
from sidestream.ops.kda.torch_impl import gate, recurrent, short_conv
from sidestream.ops.norm.torch_impl import gated_rms_norm


def decode_step(
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
    """Every row is the one token of a sequence of its own: convolve, gate, run the delta rule, norm.

    Formula: ``Glm5NextTextKimiDeltaAttention`` of transformers' ``glm5_next`` between its input and output products;
    the operators ``short_conv``, ``gate``, ``recurrent`` and ``gated_rms_norm`` say the parts.

    Args:
        projected: [T, 3 * H * D + 2 * D + H], contiguous: q, k and v, the low-rank inputs of the forget and the
            output gate, beta before its sigmoid.
        conv_state: [rows, 3 * H * D], flat ring rows in the dtype of ``projected``; takes the row's q, k, v.
        state: [slots, versions, H, D, D] fp32, contiguous, as ``recurrent`` keeps it. Rows of slot 0 at position 0 are
            padding: they start from zeros, write scratch, and stay finite.
        conv_weight: [3 * H * D, w] fp32.
        plan: of this step, window w, one token a sequence.
        expand: [2, H * D, D], the second halves of the two low-rank products, forget gate first.
        dt_bias: [H * D] fp32; A_log: [H] fp32; lower_bound: as in ``gate``.
        norm_weight: [D]; norm_eps: of the gated norm.
        slots, start: [T] int64.
    Returns:
        [T, H * D] in the dtype of ``projected``.
    """
    T, heads, dim = projected.shape[0], A_log.numel(), expand.shape[2]
    qkv, low, beta = torch.split(projected, [3 * heads * dim, 2 * dim, heads], dim=-1)
    low = low.view(T, 2, dim).transpose(0, 1)
    forget, output_gate = torch.bmm(low, expand.transpose(1, 2)).unbind()
    decay = gate(forget, dt_bias, A_log, lower_bound=lower_bound)
    output_gate = output_gate.view(T, heads, dim)
    beta = beta.sigmoid()
    q, k, v = short_conv(qkv, conv_state, conv_weight, plan=plan).view(T, 3, heads, dim).unbind(1)
    shape = (T, 1, heads)
    mixed = recurrent(
        q.reshape(*shape, dim),
        k.reshape(*shape, dim),
        v.reshape(*shape, dim),
        g=decay.reshape(*shape, dim),
        beta=beta.reshape(shape),
        state=state,
        slots=slots,
        start=start,
    )
    return gated_rms_norm(mixed.reshape(T, heads, dim), output_gate, norm_weight, eps=norm_eps).reshape(T, -1)
