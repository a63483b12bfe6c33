"""Kimi Delta Attention token by token (Kimi Linear, arXiv 2510.26692; transformers' ``glm5_next``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sidestream.core.ring import RingPlan
from sidestream.ops.kda.kept_states import Kept
from sidestream.ops.norm.reference import gated_rms_norm


def short_conv(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, *, plan: RingPlan) -> torch.Tensor:
    """Each token's window, tap by tap. See ``torch_impl.short_conv``."""
    zero = torch.zeros(1, x.shape[1])
    source = torch.cat([zero, x.float(), state[plan.carry_rows].float()])
    if plan.copy_from is not None and plan.copy_to is not None:
        carried = state[plan.copy_from].clone()
        for value, row in zip(carried, plan.copy_to.tolist(), strict=True):
            state[row] = value
    out = torch.zeros(x.shape, dtype=torch.float32)
    for t in range(x.shape[0]):
        for tap in range(plan.window):
            row = int(plan.window_rows[t, tap])
            if row != 0:
                out[t] += source[row] * weight[:, tap].float()
    for token, row in zip(plan.keep_tokens.tolist(), plan.keep_rows.tolist(), strict=True):
        state[row] = x[token]
    return (out * torch.sigmoid(out)).to(x.dtype)


def gate(f: torch.Tensor, dt_bias: torch.Tensor, A_log: torch.Tensor, *, lower_bound: float | None) -> torch.Tensor:
    """The two formulas of ``Glm5NextTextForgetGate``. See ``torch_impl.gate``."""
    H = A_log.numel()
    raw = (f.float() + dt_bias.float()).reshape(f.shape[0], H, -1)
    rate = torch.exp(A_log.float()).reshape(1, H, 1)
    if lower_bound is not None:
        return lower_bound / (1 + torch.exp(-rate * raw))
    return -rate * torch.where(raw > 20, raw, torch.log1p(torch.exp(raw.clamp(max=20))))


def recurrent(
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
    """Request by request, head by head. See ``torch_impl.recurrent``."""
    out = torch.zeros(v.shape, dtype=torch.float32)
    for r in range(q.shape[0]):
        slot, position = int(slots[r]), int(start[r])
        for h in range(q.shape[2]):
            memory = _initial(state, slot, position, h)
            for i in range(q.shape[1]):
                memory = _decayed_delta(memory, k[r, i, h], v[r, i, h], g[r, i, h], beta[r, i, h])
                out[r, i, h] = _read(memory, q[r, i, h])
                state[slot, (position + i + 1) % state.shape[1], h] = memory
    return out.to(v.dtype)


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    slots: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    kept: Kept = (),
    chunk_size: int = 64,
) -> torch.Tensor:
    """Sequence by sequence, token by token; ``chunk_size`` is ignored. See ``torch_chunked.chunked``."""
    out = torch.zeros(v.shape, dtype=torch.float32)
    first = 0
    for r, (slot, position, length) in enumerate(zip(slots, starts, lengths, strict=True)):
        wanted = {split.position: split.slot for split in kept[r]} if kept else {}
        for h in range(q.shape[1]):
            memory = _initial(state, slot, position, h)
            for t in range(first, first + length):
                memory = _decayed_delta(memory, k[t, h], v[t, h], g[t, h], beta[t, h])
                out[t, h] = _read(memory, q[t, h])
                end = position + t - first + 1
                if end in wanted:
                    state[wanted[end], end % state.shape[1], h] = memory
            state[slot, (position + length) % state.shape[1], h] = memory
        first += length
    return out.to(v.dtype)


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
    """The parts above in fp32, one behind the other; rounded once. See ``decode.decode_step``."""
    T, H, D = projected.shape[0], A_log.numel(), expand.shape[2]
    qkv, low_f, low_g, beta = torch.split(projected.float(), [3 * H * D, D, D, H], dim=-1)
    forget, output_gate = low_f @ expand[0].float().T, low_g @ expand[1].float().T
    convolved = short_conv(qkv, conv_state, conv_weight, plan=plan).view(T, 3, 1, H, D)
    mixed = recurrent(
        convolved[:, 0],
        convolved[:, 1],
        convolved[:, 2],
        g=gate(forget, dt_bias, A_log, lower_bound=lower_bound).view(T, 1, H, D),
        beta=torch.sigmoid(beta).view(T, 1, H),
        state=state,
        slots=slots,
        start=start,
    )
    normed = gated_rms_norm(mixed.view(T, H, D), output_gate.view(T, H, D), norm_weight, eps=norm_eps)
    return normed.reshape(T, H * D).to(projected.dtype)


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
    """The parts above in fp32; a decode of n tokens leaves n states. See ``mixed.mixed_step``."""
    T, H, D = sum(lengths), A_log.numel(), expand.shape[2]
    qkv, low_f, low_g, beta = torch.split(projected[:T].float(), [3 * H * D, D, D, H], dim=-1)
    forget, output_gate = low_f @ expand[0].float().T, low_g @ expand[1].float().T
    q, k, v = short_conv(qkv, conv_state, conv_weight, plan=plan).view(T, 3, H, D).unbind(1)
    g, beta = gate(forget, dt_bias, A_log, lower_bound=lower_bound), torch.sigmoid(beta)
    mixed, first = torch.empty(T, H, D), 0
    for r, length in enumerate(lengths):
        part = slice(first, first + length)
        if r < decodes:
            one = slice(r, r + 1)
            tokens = {name: x[None, part] for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))}
            mixed[part] = recurrent(**tokens, state=state, slots=slots[one], start=start[one])[0]
        else:
            mixed[part] = chunked(
                q[part],
                k[part],
                v[part],
                g=g[part],
                beta=beta[part],
                state=state,
                slots=[host_slots[r]],
                starts=[starts[r]],
                lengths=[length],
                kept=kept[r : r + 1],
            )
        first += length
    normed = gated_rms_norm(mixed, output_gate.view(T, H, D), norm_weight, eps=norm_eps)
    out = torch.zeros(T if rows is None else rows, H * D, dtype=projected.dtype)
    out[:T] = normed.reshape(T, H * D)
    return out


def _initial(state: torch.Tensor, slot: int, position: int, head: int) -> torch.Tensor:
    """What the sequence has seen before ``position``, [K, V]: nothing at 0, whatever the slot held."""
    if position == 0:
        return torch.zeros(state.shape[3:])
    return state[slot, position % state.shape[1], head].clone()


def _decayed_delta(
    memory: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Forget by ``exp(g)`` a channel, then move what key k recalls towards v by ``beta``. memory [K, V]."""
    key = _unit(k.float())
    memory = memory * torch.exp(g.float())[:, None]
    error = v.float() - key @ memory
    return memory + beta.float() * torch.outer(key, error)


def _read(memory: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (_unit(q.float()) @ memory).mul(q.shape[-1] ** -0.5)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum() + 1e-6)
