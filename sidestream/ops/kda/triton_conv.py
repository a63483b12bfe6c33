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


def short_conv(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, *, plan: RingPlan) -> torch.Tensor:
    """As ``torch_impl.short_conv``, for channels that stand together.

    Two kernels: the ring is written when all its rows are read, and one token may write what another reads.
    """
    T, C = x.shape
    out = torch.empty(T, C, dtype=x.dtype, device=x.device)
    _launch(x, state, weight, out, plan, first=0, kept=0, tokens=T, unit=0)
    return out


def heads_conv(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, *, plan: RingPlan, tokens: int, first: int, dim: int
) -> torch.Tensor:
    """``short_conv`` of queries, keys and values for chunks of prompts: apart, and the first two of unit length a head.

    Args:
        x: [T or more, 3 * H * D]; rows from T on are not read.
        tokens: T, those of the plan. The ``first`` of them, one a sequence, are left to another kernel.
        dim: D, a power of two up to 512.
    Returns:
        [3, T - first, H, D] in ``x.dtype``, normalised in fp32 before they are rounded.
    """
    width = x.shape[1] // 3
    out = torch.empty(3, tokens - first, width // dim, dim, dtype=x.dtype, device=x.device)
    _launch(x, state, weight, out, plan, first=first, kept=first, tokens=tokens, unit=dim)
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
) -> None:
    """Convolve tokens from ``first`` on, make the plan's copies, then keep from its entry ``kept`` on."""
    C = x.shape[1]
    planes = 3 if unit else 1
    if tokens > first:
        block = max(HEAD_CHANNELS, unit) if unit else CHANNELS // 2
        blocks = planes * triton.cdiv(C // planes, block)
        _convolve[(triton.cdiv(tokens - first, TOKENS), blocks)](
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
            TOKENS=TOKENS,
            BLOCK=block,
            PLANES=planes,
            UNIT=unit,
            num_warps=8 if unit else 4,
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
def log_decay(raw: tl.tensor, rate: tl.tensor, lower_bound: tl.tensor, BOUNDED: tl.constexpr) -> tl.tensor:
    """The two formulas of the forget gate, see ``torch_impl.gate``."""
    if BOUNDED:
        decay = lower_bound * tl.sigmoid(rate * raw)
    else:
        decay = -rate * tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
    return decay


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
    """Window rows: 0 for nothing, then the step's tokens, then the carried rows (``RingPlan``). The result is laid out
    as ``PLANES`` times [T - first, width]; all but the last are normalised over ``UNIT`` channels, if not 0."""
    t = first + tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    C = PLANES * width
    blocks = tl.cdiv(width, BLOCK)
    plane = tl.program_id(1) // blocks
    column = (tl.program_id(1) % blocks) * BLOCK + tl.arange(0, BLOCK)
    real = (column < width)[None, :]
    channel = plane * width + column
    total = tl.zeros((TOKENS, BLOCK), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        source = tl.load(window_rows + t * TAPS + tap, mask=t < T, other=0)
        carried = source > T
        row = tl.load(carry_rows + source - (T + 1), mask=carried, other=0)
        own = real & ((source > 0) & (source <= T))[:, None]
        token = tl.load(x + (source - 1)[:, None] * x_row + channel[None, :], mask=own, other=0.0)
        there = real & carried[:, None]
        past = tl.load(state + row[:, None] * C + channel[None, :], mask=there, other=0.0)
        scale = tl.load(weight + channel * weight_channel + tap * weight_tap, mask=column < width, other=0.0)
        total += (token.to(tl.float32) + past.to(tl.float32)) * scale.to(tl.float32)[None, :]
    result = total * tl.sigmoid(total)
    if UNIT > 0:
        heads = tl.reshape(result, (TOKENS, BLOCK // UNIT, UNIT))
        length = tl.rsqrt(tl.sum(heads * heads, axis=2, keep_dims=True) + l2_eps)
        shorter = tl.reshape(heads * length, (TOKENS, BLOCK))
        result = tl.where(plane < PLANES - 1, shorter, result)
    place = (plane * (T - first) + t - first)[:, None] * width + column[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=real & (t < T)[:, None])


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
