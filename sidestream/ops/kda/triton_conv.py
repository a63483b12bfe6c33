"""Short convolution and forget gate of Kimi Delta Attention as Triton kernels.

Floor: each element read once and written once, 100 KB a token at 24,576 bf16 channels: 23 ns. A token's inputs are read
by the windows of up to four tokens, mostly in one program, so that caches have it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sidestream.core.ring import RingPlan
from sidestream.ops.kda.torch_impl import L2_EPS, copy_carried

CHANNELS = 1024
"""Of one token that a program gates or keeps; half as many are convolved, of several tokens."""
HEAD_CHANNELS = 256
"""Of several tokens that a program convolves and normalises, whole heads."""
TOKENS = 8
"""That a program convolves: they share most of their inputs."""
RUN, STEP = 32, 4
"""Tokens that a program walks along, with the last three inputs in registers, and how many inputs it asks for ahead."""
WALK_CHANNELS = 1024
"""Of each token that it convolves and normalises."""


def short_conv(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, *, plan: RingPlan) -> torch.Tensor:
    """As ``torch_impl.short_conv``, for channels that stand together.

    Two kernels: the ring is written when all its rows are read, and one token may write what another reads.
    """
    T, C = x.shape
    out = torch.empty(T, C, dtype=x.dtype, device=x.device)
    _launch(x, state, weight, out, plan, first=0, kept=0, tokens=T, unit=0)
    return out


def heads_conv(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    *,
    plan: RingPlan,
    tokens: int,
    first: int,
    dim: int,
    walk: bool | None = None,
) -> torch.Tensor:
    """``short_conv`` of queries, keys and values for chunks of prompts: apart, and the first two of unit length a head.

    Args:
        x: [T or more, 3 * H * D]; rows from T on are not read.
        tokens: T, those of the plan. The ``first`` of them, one a sequence, are left to another kernel.
        dim: D, a power of two up to 512.
        walk: each input is read once, by a program that walks along tokens (windows of four only); None where heads
            are of 128 and fill each program's channels.
    Returns:
        [3, T - first, H, D] in ``x.dtype``, normalised in fp32 before they are rounded.
    """
    width = x.shape[1] // 3
    out = torch.empty(3, tokens - first, width // dim, dim, dtype=x.dtype, device=x.device)
    if walk is None:
        walk = dim == 128 and width % WALK_CHANNELS == 0  # tried on a GPU at this size alone
    walk = walk and plan.window == STEP
    _launch(x, state, weight, out, plan, first=first, kept=first, tokens=tokens, unit=dim, walk=walk)
    return out


def _launch(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    plan: RingPlan,
    *,
    first: int,
    kept: int,
    tokens: int,
    unit: int,
    walk: bool = False,
) -> None:
    """Convolve tokens from ``first`` on, make the plan's copies, then keep from its entry ``kept`` on."""
    C = x.shape[1]
    planes = 3 if unit else 1
    block = (WALK_CHANNELS if walk else max(HEAD_CHANNELS, unit)) if unit else CHANNELS // 2
    blocks = planes * triton.cdiv(C // planes, block)
    if tokens > first:
        kernel, run, how = _convolve, TOKENS, {"TOKENS": TOKENS}
        if walk:
            kernel, run, how = _walk, RUN, {"RUN": RUN, "STEP": STEP, "maxnreg": 128}  # 4 programs a multiprocessor
        kernel[(triton.cdiv(tokens - first, run), blocks)](
            x,
            state,
            weight,
            out,
            plan.carry_rows,
            plan.window_rows,
            x.stride(0),
            weight.stride(0),
            weight.stride(1),
            tokens,
            first,
            C // planes,
            L2_EPS,
            TAPS=plan.window,
            BLOCK=block,
            PLANES=planes,
            UNIT=unit,
            num_warps=8 if unit and not walk else 4,
            **how,
        )
    copy_carried(state, plan)
    entries = plan.keep_tokens.shape[0] - kept
    if entries > 0:
        grid = (entries, triton.cdiv(C, CHANNELS))
        _keep[grid](x, state, plan.keep_tokens, plan.keep_rows, kept, x.stride(0), C, BLOCK=CHANNELS, num_warps=4)


def gate(f: torch.Tensor, dt_bias: torch.Tensor, A_log: torch.Tensor, *, lower_bound: float | None) -> torch.Tensor:
    """As ``torch_impl.gate``, for channels that stand together."""
    T, width = f.shape
    H = A_log.numel()
    out = torch.empty(T, H, width // H, dtype=torch.float32, device=f.device)
    if out.numel():
        _gate[(T, triton.cdiv(width, CHANNELS))](
            f,
            dt_bias,
            A_log,
            out,
            0.0 if lower_bound is None else lower_bound,
            f.stride(0),
            WIDTH=width,
            K=width // H,
            BOUNDED=lower_bound is not None,
            BLOCK=CHANNELS,
            num_warps=4,
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def sigmoid(x: tl.tensor) -> tl.tensor:
    """To 2**-21, in half the instructions of a division: a power of two, and the square of a reciprocal root."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit  # type: ignore[untyped-decorator]
def log_decay(raw: tl.tensor, rate: tl.tensor, lower_bound: tl.tensor, BOUNDED: tl.constexpr) -> tl.tensor:
    """The two formulas of the forget gate, see ``torch_impl.gate``."""
    if BOUNDED:
        decay = lower_bound * tl.sigmoid(rate * raw)
    else:
        decay = -rate * tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
    return decay


@triton.jit  # type: ignore[untyped-decorator]
def _window(
    x: tl.tensor,
    state: tl.tensor,
    weight: tl.tensor,
    carry_rows: tl.tensor,
    window_rows: tl.tensor,
    x_row: tl.tensor,
    weight_channel: tl.tensor,
    weight_tap: tl.tensor,
    T: tl.tensor,
    t: tl.tensor,
    channel: tl.tensor,
    real: tl.tensor,
    C: tl.tensor,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """Weighted sums of any windows, tokens ``t`` by ``channel``. Window rows: 0 for nothing, then the step's tokens,
    then the carried rows (``RingPlan``)."""
    total = tl.zeros((t.shape[0], channel.shape[0]), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        source = tl.load(window_rows + t * TAPS + tap, mask=t < T, other=0)
        carried = source > T
        row = tl.load(carry_rows + source - (T + 1), mask=carried, other=0)
        own = real[None, :] & ((source > 0) & (source <= T))[:, None]
        token = tl.load(x + (source - 1)[:, None] * x_row + channel[None, :], mask=own, other=0.0)
        there = real[None, :] & carried[:, None]
        past = tl.load(state + row[:, None] * C + channel[None, :], mask=there, other=0.0)
        scale = tl.load(weight + channel * weight_channel + tap * weight_tap, mask=real, other=0.0)
        total = tl.fma(token.to(tl.float32) + past.to(tl.float32), scale.to(tl.float32)[None, :], total)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _activated(
    total: tl.tensor, plane: tl.tensor, l2_eps: tl.tensor, PLANES: tl.constexpr, UNIT: tl.constexpr
) -> tl.tensor:
    """Tokens by channels. All planes but the last are normalised over ``UNIT`` channels, if not 0."""
    result = total * sigmoid(total)
    if UNIT > 0:
        heads = tl.reshape(result, (total.shape[0], total.shape[1] // UNIT, UNIT))
        length = tl.rsqrt(tl.sum(heads * heads, axis=2, keep_dims=True) + l2_eps)
        shorter = tl.reshape(heads * tl.where(plane < PLANES - 1, length, 1.0), (total.shape[0], total.shape[1]))
        result = shorter
    return result


@triton.jit(do_not_specialize=["T", "first"])  # type: ignore[untyped-decorator]
def _convolve(
    x: tl.tensor,
    state: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    carry_rows: tl.tensor,
    window_rows: tl.tensor,
    x_row: tl.tensor,
    weight_channel: tl.tensor,
    weight_tap: tl.tensor,
    T: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    l2_eps: tl.tensor,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLANES: tl.constexpr,
    UNIT: tl.constexpr,
) -> None:
    """The result is laid out as ``PLANES`` times [T - first, width]."""
    t = first + tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    blocks = tl.cdiv(width, BLOCK)
    plane = tl.program_id(1) // blocks
    column = (tl.program_id(1) % blocks) * BLOCK + tl.arange(0, BLOCK)
    real = column < width
    total = _window(
        x,
        state,
        weight,
        carry_rows,
        window_rows,
        x_row,
        weight_channel,
        weight_tap,
        T,
        t,
        plane * width + column,
        real,
        PLANES * width,
        TAPS,
    )
    result = _activated(total, plane, l2_eps, PLANES, UNIT)
    place = (plane * (T - first) + t - first)[:, None] * width + column[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=real[None, :] & (t < T)[:, None])


@triton.jit(do_not_specialize=["T", "first"])  # type: ignore[untyped-decorator]
def _walk(
    x: tl.tensor,
    state: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    carry_rows: tl.tensor,
    window_rows: tl.tensor,
    x_row: tl.tensor,
    weight_channel: tl.tensor,
    weight_tap: tl.tensor,
    T: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    l2_eps: tl.tensor,
    TAPS: tl.constexpr,
    RUN: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    PLANES: tl.constexpr,
    UNIT: tl.constexpr,
) -> None:
    """As ``_convolve`` for windows of four, along ``RUN`` tokens. Where all of these have their window in the step it
    is kept in registers; a run in which a sequence starts goes by window rows. Inputs are asked for before it is known
    which: other rows of the step do no harm."""
    tl.static_assert(TAPS == 4 and STEP == 4)
    start = first + tl.program_id(0).to(tl.int64) * RUN
    blocks = tl.cdiv(width, BLOCK)
    plane = tl.program_id(1) // blocks
    column = (tl.program_id(1) % blocks) * BLOCK + tl.arange(0, BLOCK)
    real = column < width
    channel = plane * width + column
    mine = start + tl.arange(0, RUN)
    earliest = tl.load(window_rows + mine * TAPS, mask=mine < T, other=0)
    odd = (mine < T) & ((earliest <= 0) | (earliest != mine - (TAPS - 2)))
    place = out + (plane * (T - first) + start - first) * width + column
    taps = weight + channel * weight_channel
    w0 = tl.load(taps, mask=real, other=0.0).to(tl.float32)
    w1 = tl.load(taps + weight_tap, mask=real, other=0.0).to(tl.float32)
    w2 = tl.load(taps + 2 * weight_tap, mask=real, other=0.0).to(tl.float32)
    w3 = tl.load(taps + 3 * weight_tap, mask=real, other=0.0).to(tl.float32)
    at = x + start * x_row + channel
    before = real & (start >= TAPS - 1)
    a = tl.load(at - 3 * x_row, mask=before, other=0.0).to(tl.float32)
    b = tl.load(at - 2 * x_row, mask=before, other=0.0).to(tl.float32)
    c = tl.load(at - x_row, mask=before, other=0.0).to(tl.float32)
    d = tl.load(at, mask=real & (start < T), other=0.0)
    e = tl.load(at + x_row, mask=real & (start + 1 < T), other=0.0)
    f = tl.load(at + 2 * x_row, mask=real & (start + 2 < T), other=0.0)
    g = tl.load(at + 3 * x_row, mask=real & (start + 3 < T), other=0.0)
    if tl.max(odd.to(tl.int32), axis=0) == 0:
        for step in tl.range(0, RUN, STEP, num_stages=1):
            t = start + step
            d0, d1, d2, d3 = d.to(tl.float32), e.to(tl.float32), f.to(tl.float32), g.to(tl.float32)
            at += STEP * x_row
            more = real & (step + STEP < RUN)
            d = tl.load(at, mask=more & (t + 4 < T), other=0.0)
            e = tl.load(at + x_row, mask=more & (t + 5 < T), other=0.0)
            f = tl.load(at + 2 * x_row, mask=more & (t + 6 < T), other=0.0)
            g = tl.load(at + 3 * x_row, mask=more & (t + 7 < T), other=0.0)
            r0 = tl.fma(d0, w3, tl.fma(c, w2, tl.fma(b, w1, a * w0)))
            r1 = tl.fma(d1, w3, tl.fma(d0, w2, tl.fma(c, w1, b * w0)))
            r2 = tl.fma(d2, w3, tl.fma(d1, w2, tl.fma(d0, w1, c * w0)))
            r3 = tl.fma(d3, w3, tl.fma(d2, w2, tl.fma(d1, w1, d0 * w0)))
            r0 = _activated(r0[None, :], plane, l2_eps, PLANES, UNIT).to(out.dtype.element_ty)
            r1 = _activated(r1[None, :], plane, l2_eps, PLANES, UNIT).to(out.dtype.element_ty)
            r2 = _activated(r2[None, :], plane, l2_eps, PLANES, UNIT).to(out.dtype.element_ty)
            r3 = _activated(r3[None, :], plane, l2_eps, PLANES, UNIT).to(out.dtype.element_ty)
            row = (place + step * width)[None, :]
            tl.store(row, r0, mask=(real & (t < T))[None, :])
            tl.store(row + width, r1, mask=(real & (t + 1 < T))[None, :])
            tl.store(row + 2 * width, r2, mask=(real & (t + 2 < T))[None, :])
            tl.store(row + 3 * width, r3, mask=(real & (t + 3 < T))[None, :])
            a, b, c = d1, d2, d3
    else:
        for step in tl.range(0, RUN, 2, num_stages=1):
            t = start + step + tl.arange(0, 2)
            total = _window(
                x,
                state,
                weight,
                carry_rows,
                window_rows,
                x_row,
                weight_channel,
                weight_tap,
                T,
                t,
                channel,
                real,
                PLANES * width,
                TAPS,
            )
            result = _activated(total, plane, l2_eps, PLANES, UNIT).to(out.dtype.element_ty)
            rows = place[None, :] + (step + tl.arange(0, 2))[:, None] * width
            tl.store(rows, result, mask=real[None, :] & (t < T)[:, None])


@triton.jit(do_not_specialize=["first"])  # type: ignore[untyped-decorator]
def _keep(
    x: tl.tensor,
    state: tl.tensor,
    keep_tokens: tl.tensor,
    keep_rows: tl.tensor,
    first: tl.tensor,
    x_row: tl.tensor,
    C: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    m = first + tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(x + tl.load(keep_tokens + m) * x_row + channel, mask=channel < C, other=0.0)
    row = tl.load(keep_rows + m)
    tl.store(state + row * C + channel, token.to(state.dtype.element_ty), mask=channel < C)


@triton.jit  # type: ignore[untyped-decorator]
def _gate(
    f: tl.tensor,
    dt_bias: tl.tensor,
    a_log: tl.tensor,
    out: tl.tensor,
    lower_bound: tl.tensor,
    f_row: tl.tensor,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    t = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = channel < WIDTH
    raw = tl.load(f + t * f_row + channel, mask=real, other=0.0).to(tl.float32)
    raw += tl.load(dt_bias + channel, mask=real, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + channel // K, mask=real, other=0.0).to(tl.float32))
    tl.store(out + t * WIDTH + channel, log_decay(raw, rate, lower_bound, BOUNDED), mask=real)
