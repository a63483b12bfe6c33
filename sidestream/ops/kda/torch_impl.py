"""Short convolution, gate and recurrent step of Kimi Delta Attention, in few torch calls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from sidestream.core.ring import RingPlan
from sidestream.ops.norm.torch_impl import inverse_l2

L2_EPS = 1e-6
NUMPY_TOKENS = 32
"""Tokens up to which the convolution's arithmetic is numpy's, on a CPU."""
CONV_BLOCK = 256
"""Tokens whose windows are gathered at once: a block of them stays in a CPU's cache."""


def short_conv(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, *, plan: RingPlan) -> torch.Tensor:
    """Causal depthwise convolution over each sequence, then silu; fp32 inside, rounded once.

    Formula: ``causal_conv1d_fn`` of transformers' ``glm5_next``. Rows that the plan does not name are neither read nor
    written, and a fresh sequence sees zeros before its start whatever its slot held.

    Args:
        x: [T, C], strides are free.
        state: [rows, C], flat ring rows; takes the plan's ``keep_tokens`` of ``x`` after it was read and its copies
            were made.
        weight: [C, w], the last tap is the token itself.
        plan: of this step, window w.
    Returns:
        [T, C] in ``x.dtype``, contiguous.
    """
    T, C = x.shape
    assert weight.shape == (C, plan.window), (
        f"weight {tuple(weight.shape)} does not fit {C} channels, {plan.window} taps"
    )
    taps = weight.float().t().contiguous()
    if T <= NUMPY_TOKENS and x.device.type == "cpu" and x.dtype == state.dtype == torch.float32:
        return F.silu(_short_conv_numpy(x, state, taps, plan), inplace=True)
    carried = state.index_select(0, plan.carry_rows)
    source = torch.cat((x.new_zeros(1, C), x, carried)).float()
    if T <= CONV_BLOCK:
        out = _convolve(source, taps, plan.window_rows)
    else:
        out = torch.empty(T, C, dtype=torch.float32, device=x.device)
        for first in range(0, T, CONV_BLOCK):
            block = slice(first, first + CONV_BLOCK)
            out[block] = _convolve(source, taps, plan.window_rows[block])
    copy_carried(state, plan)
    kept = x if plan.keeps_all else x.index_select(0, plan.keep_tokens)
    state.index_copy_(0, plan.keep_rows, kept.to(state.dtype))
    return F.silu(out, inplace=True).to(x.dtype)


def copy_carried(state: torch.Tensor, plan: RingPlan) -> None:
    """The plan's copies within the ring rows [rows, C]: few steps have any."""
    if plan.copy_from is not None and plan.copy_to is not None:
        state.index_copy_(0, plan.copy_to, state.index_select(0, plan.copy_from))


def _short_conv_numpy(x: torch.Tensor, state: torch.Tensor, taps: torch.Tensor, plan: RingPlan) -> torch.Tensor:
    """``short_conv`` of few fp32 tokens before its silu: numpy's calls cost a third of torch's."""
    T, C = x.shape
    tokens, ring, carry_rows = x.numpy(), state.numpy(), plan.carry_rows.numpy()
    source = np.empty((1 + T + carry_rows.shape[0], C), dtype=np.float32)
    source[0] = 0.0
    source[1 : 1 + T] = tokens
    ring.take(carry_rows, axis=0, out=source[1 + T :], mode="clip")  # else take buffers what it writes
    windows = source.take(plan.window_rows.numpy(), axis=0)
    np.multiply(windows, taps.numpy(), windows)
    out = torch.empty(T, C)
    np.add.reduce(windows, axis=1, out=out.numpy())
    copy_carried(state, plan)
    ring[plan.keep_rows.numpy()] = tokens if plan.keeps_all else tokens[plan.keep_tokens.numpy()]
    return out


def _convolve(source: torch.Tensor, taps: torch.Tensor, window_rows: torch.Tensor) -> torch.Tensor:
    """[T, C] from source rows [.., C], taps [w, C] and window rows [T, w]."""
    T, w = window_rows.shape
    windows = source.index_select(0, window_rows.view(-1)).view(T, w, -1)
    return windows.mul_(taps).sum(dim=1)


@dataclass(frozen=True, slots=True)
class ForgetGate:
    """What ``gate`` needs beside its input, for functions that call it."""

    dt_bias: torch.Tensor
    A_log: torch.Tensor
    lower_bound: float | None


def gate(f: torch.Tensor, dt_bias: torch.Tensor, A_log: torch.Tensor, *, lower_bound: float | None) -> torch.Tensor:
    """Log decay a channel: how much of its memory a token keeps, before the exponential.

    Formula: ``Glm5NextTextForgetGate``: ``lower_bound * sigmoid(exp(A_log) * (f + dt_bias))``, or
    ``-exp(A_log) * softplus(f + dt_bias)`` without a bound. It is not a clamp.

    Args:
        f: [T, H * K].
        dt_bias: [H * K].
        A_log: [H], any shape of that many elements.
    Returns:
        [T, H, K] fp32, <= 0.
    """
    H = A_log.numel()
    raw = torch.add(f.float(), dt_bias).view(f.shape[0], H, -1)
    rate = A_log.float().exp().view(H, 1)
    if lower_bound is not None:
        return raw.mul_(rate).sigmoid_().mul_(lower_bound)
    return F.softplus(raw).mul_(rate.neg_())


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
    """Uniform decode: n tokens of each request, each reading what all before it left.

    Formula: ``recurrent_kimi_delta_attention`` of transformers' ``glm5_next``, with q and k normalised here.

    Args:
        q, k: [R, n, H, K], v: [R, n, H, V], any float dtype.
        g: [R, n, H, K] fp32 log decay; beta: [R, n, H], after its sigmoid.
        state: [slots, versions, H, K, V] fp32, contiguous. Version ``p % versions`` of a slot is what the sequence
            knows before position p, so taking back up to ``versions - 1`` tokens is setting the position back.
        slots: [R] int64; only padding rows may share one.
        start: [R] int64, position of each request's first token. At 0 nothing of the slot is read.
    Returns:
        [R, n, H, V] in ``v.dtype``. The state after each token is written to its version.
    """
    R, n, H, K = q.shape
    V = v.shape[-1]
    versions = state.shape[1]
    memory = state.view(-1, H, K, V)
    rows = slots if versions == 1 else torch.add(start % versions, slots, alpha=versions)
    first = _first_of_run(rows) if versions == 1 else None
    now = memory.index_select(0, rows) if first is None else memory[first : first + R]
    _forget_fresh(now, start)
    heads = now.view(R * H, K, V)
    kq = torch.stack((k, q)).float()
    kq.mul_(inverse_l2(kq, L2_EPS))
    key, query = kq.unbind(0)
    keys, queries = _steps(key, (R * H, 1, K)), _steps(query, (R * H, 1, K))
    values, betas = _steps(v.float(), (R * H, 1, V)), _steps(beta.float(), (R * H, 1, 1))
    outputs = []
    for i, kept in enumerate(_steps(g.exp(), (R * H, K, 1))):
        heads.mul_(kept)
        error = torch.baddbmm(values[i], keys[i], heads, alpha=-1).mul_(betas[i])
        heads.addcmul_(keys[i].view(R * H, K, 1), error)
        outputs.append(torch.baddbmm(error, queries[i], heads, beta=0, alpha=K**-0.5))
        if versions > 1:
            rows = torch.add((start + (i + 1)) % versions, slots, alpha=versions)
        if first is None:
            _store(memory, rows, now)
    out = outputs[0] if n == 1 else torch.stack(outputs).view(n, R, H, V).transpose(0, 1)
    return out.reshape(R, n, H, V).to(v.dtype)


def _steps(x: torch.Tensor, shape: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
    """[R, n, H, ..] -> n tensors of ``shape`` [R * H, ..], contiguous."""
    if x.shape[1] == 1:
        return (x.reshape(shape),)
    return tuple(x.transpose(0, 1).reshape(x.shape[1], *shape).unbind(0))


def _first_of_run(rows: torch.Tensor) -> int | None:
    """The first of consecutive ``rows``, on a CPU: such states can be changed where they stand. Else None."""
    if rows.device.type != "cpu":
        return None
    numbers: list[int] = rows.numpy().tolist()
    first = numbers[0]
    return first if numbers == list(range(first, first + len(numbers))) else None


def _forget_fresh(now: torch.Tensor, start: torch.Tensor) -> None:
    """Zero the states [R, ..] of requests that start at position 0, by writing: what is there may be NaN."""
    if now.device.type != "cpu":
        now.masked_fill_(start.eq(0).view(-1, 1, 1, 1), 0.0)
    elif 0 in (starts := start.numpy().tolist()):
        now.numpy()[[position == 0 for position in starts]] = 0.0


def _store(memory: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Write fp32 ``values`` to rows of memory: on a CPU ``index_copy_`` takes four times as long as numpy."""
    if memory.device.type == "cpu":
        memory.numpy()[rows.numpy()] = values.numpy()
    else:
        memory.index_copy_(0, rows, values)
