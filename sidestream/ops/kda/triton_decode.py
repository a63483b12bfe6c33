"""A decode step of Kimi Delta Attention in one Triton kernel: a program is one head of one row, its state in registers.

Floor: the state, read once and written once, 8 * D * D bytes a row and head: 8.4 MB a row at 64 heads of 128, so 2.0 us
at batch 1, 16 at 8, 125 at 64 and 251 at 128 at 4.28 TB/s. All else is 1 % of that.

A program loads its 64 KB of state first and convolves while they are on their way. What the new state recalls is taken
from the old one, ``q (S + k e) = q S + (q k) e``, so that both products over the state happen in one pass before it
changes. A head's channels of the convolution ring belong to its program alone, so the ring is read and then written
here, though the row written is the oldest one read.

Few rows leave the chip's multiprocessors idle: there each program also expands the head's two low-rank rows (64 KB of
weights) instead of a batched product before it. Which it is depends on the number of padded rows, so bits do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sidestream.core.ring import RingPlan
from sidestream.ops.kda.torch_impl import L2_EPS
from sidestream.ops.kda.triton_conv import log_decay


@dataclass(frozen=True, slots=True)
class Launch:
    """How the kernel is launched.

    Attributes:
        expands: the low-rank rows itself.
        columns: of the state that are worked on at once, while the next are on their way.
        max_registers: a thread, None for as many as it takes.
    """

    expands: bool
    columns: int
    num_warps: int
    max_registers: int | None = None


def launch_for(rows: int, heads: int) -> Launch:
    """By the number of programs, as swept on an H200 with its 132 multiprocessors."""
    if rows * heads <= 128:
        return Launch(expands=True, columns=128, num_warps=8)
    return Launch(expands=False, columns=64 if rows * heads <= 256 else 32, num_warps=4)


def takes(
    projected: torch.Tensor, conv_state: torch.Tensor, state: torch.Tensor, expand: torch.Tensor, plan: RingPlan
) -> bool:
    """Whether the kernel runs these: heads of 16 to 128, one dtype, a convolution of 2 taps or more."""
    fits = expand.shape[2] in (16, 32, 64, 128) and 2 <= plan.window <= plan.length + 1
    whole = conv_state.is_contiguous() and state.is_contiguous() and expand.is_contiguous() and projected.stride(1) == 1
    return fits and whole and projected.dtype == conv_state.dtype == expand.dtype


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
    launch: Launch | None = None,
) -> torch.Tensor:
    """As ``decode.decode_step``, fp32 from the convolution to the norm; for what ``takes`` allows."""
    T, H, D = projected.shape[0], A_log.numel(), expand.shape[2]
    if launch is None:
        launch = launch_for(T, H)
    if launch.expands:
        expanded = projected  # not read
    else:
        low = projected[:, 3 * H * D : 3 * H * D + 2 * D].view(T, 2, D).transpose(0, 1)
        expanded = torch.bmm(low, expand.transpose(1, 2))
    out = torch.empty(T, H * D, dtype=projected.dtype, device=projected.device)
    limit = {} if launch.max_registers is None else {"maxnreg": launch.max_registers}
    _decode_step[(H, T)](
        projected,
        conv_state,
        state,
        out,
        expanded,
        expand,
        conv_weight,
        plan.carry_rows,
        plan.window_rows,
        plan.keep_rows,
        dt_bias,
        A_log,
        norm_weight,
        slots,
        start,
        0.0 if lower_bound is None else lower_bound,
        norm_eps,
        projected.stride(0),
        conv_weight.stride(0),
        conv_weight.stride(1),
        T * H * D,
        H,
        L2_EPS,
        VERSIONS=state.shape[1],
        D=D,
        COLUMNS=min(launch.columns, D),
        TAPS=plan.window,
        BOUNDED=lower_bound is not None,
        EXPANDS=launch.expands,
        num_warps=launch.num_warps,
        **limit,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def convolved(
    x: tl.tensor,
    conv_state: tl.tensor,
    conv_weight: tl.tensor,
    carry_rows: tl.tensor,
    window_rows: tl.tensor,
    channel: tl.tensor,
    width: tl.tensor,
    weight_channel: tl.tensor,
    weight_tap: tl.tensor,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """silu of the convolution of one token, fp32, oldest tap first. ``x`` holds its own channels; a window row of 0
    stands for a position before the sequence, whatever the ring holds."""
    total = tl.zeros_like(x).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        exists = tl.load(window_rows + tap) != 0
        row = tl.load(carry_rows + tap)
        past = tl.load(conv_state + row * width + channel, mask=exists, other=0.0)
        total += past.to(tl.float32) * tl.load(conv_weight + channel * weight_channel + tap * weight_tap)
    total += x.to(tl.float32) * tl.load(conv_weight + channel * weight_channel + (TAPS - 1) * weight_tap)
    return total * tl.sigmoid(total)


@triton.jit(do_not_specialize=["expanded_part"])  # type: ignore[untyped-decorator]
def _decode_step(
    projected: tl.tensor,
    conv_state: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    expanded: tl.tensor,
    expand: tl.tensor,
    conv_weight: tl.tensor,
    carry_rows: tl.tensor,
    window_rows: tl.tensor,
    keep_rows: tl.tensor,
    dt_bias: tl.tensor,
    a_log: tl.tensor,
    norm_weight: tl.tensor,
    slots: tl.tensor,
    start: tl.tensor,
    lower_bound: tl.tensor,
    norm_eps: tl.tensor,
    projected_row: tl.tensor,
    weight_channel: tl.tensor,
    weight_tap: tl.tensor,
    expanded_part: tl.tensor,
    H: tl.tensor,
    l2_eps: tl.tensor,
    VERSIONS: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAPS: tl.constexpr,
    BOUNDED: tl.constexpr,
    EXPANDS: tl.constexpr,
) -> None:
    h = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    width = H * D
    line = tl.arange(0, D)

    position = tl.load(start + t)
    slot = tl.load(slots + t).to(tl.int64)
    keep = tl.load(keep_rows + t)
    before = slot * VERSIONS + position % VERSIONS
    after = slot * VERSIONS + (position + 1) % VERSIONS
    old = state + (before * H + h) * D * D
    new = state + (after * H + h) * D * D
    tile = line[:, None] * D + tl.arange(0, COLUMNS)[None, :]  # [K, some of V]
    coming = tl.load(old + tile, mask=position > 0, other=0.0)

    given = projected + t * projected_row
    channel = h * D + line
    carry_rows += t * (TAPS - 1)
    window_rows += t * TAPS
    low = given + 3 * width
    beta = tl.sigmoid(tl.load(low + 2 * D + h).to(tl.float32))
    if EXPANDS:
        square = line[:, None] * D + line[None, :]
        rows = tl.load(expand + h * D * D + square).to(tl.float32)
        forget = tl.sum(rows * tl.load(low + line).to(tl.float32)[None, :], axis=1)
        rows = tl.load(expand + (H + h) * D * D + square).to(tl.float32)
        output_gate = tl.sum(rows * tl.load(low + D + line).to(tl.float32)[None, :], axis=1)
    else:
        forget = tl.load(expanded + t * width + channel).to(tl.float32)
        output_gate = tl.load(expanded + expanded_part + t * width + channel).to(tl.float32)
    rate = tl.exp(tl.load(a_log + h))
    kept = tl.exp(log_decay(forget + tl.load(dt_bias + channel), rate, lower_bound, BOUNDED))

    x_q = tl.load(given + channel)
    x_k = tl.load(given + width + channel)
    x_v = tl.load(given + 2 * width + channel)
    ring = 3 * width
    q = convolved(
        x_q, conv_state, conv_weight, carry_rows, window_rows, channel, ring, weight_channel, weight_tap, TAPS
    )
    k = convolved(
        x_k, conv_state, conv_weight, carry_rows, window_rows, width + channel, ring, weight_channel, weight_tap, TAPS
    )
    v = convolved(
        x_v,
        conv_state,
        conv_weight,
        carry_rows,
        window_rows,
        2 * width + channel,
        ring,
        weight_channel,
        weight_tap,
        TAPS,
    )
    tl.debug_barrier()  # the ring row written next is one that other threads have just read
    tl.store(conv_state + keep * ring + channel, x_q)
    tl.store(conv_state + keep * ring + width + channel, x_k)
    tl.store(conv_state + keep * ring + 2 * width + channel, x_v)
    q = q * tl.rsqrt(tl.sum(q * q, axis=0) + l2_eps)
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + l2_eps)

    kq = tl.sum(k * q, axis=0)
    q, k = q[:, None], k[:, None]
    part = tl.arange(0, D // COLUMNS)[:, None]
    values = tl.reshape(v, (D // COLUMNS, COLUMNS))
    mixed = tl.zeros_like(values)
    for i in tl.static_range(D // COLUMNS):
        memory = coming * kept[:, None]
        if i + 1 < D // COLUMNS:
            coming = tl.load(old + (i + 1) * COLUMNS + tile, mask=position > 0, other=0.0)
        recalled, seen = tl.split(tl.sum(tl.join(memory * k, memory * q), axis=0))  # one exchange between warps
        error = (tl.sum(tl.where(part == i, values, 0.0), axis=0) - recalled) * beta
        seen += kq * error
        tl.store(new + i * COLUMNS + tile, memory + k * error[None, :])
        mixed = tl.where(part == i, seen[None, :], mixed)

    mixed = tl.reshape(mixed, (D,)) * (D**-0.5)
    inverse = tl.rsqrt(tl.sum(mixed * mixed, axis=0) / D + norm_eps)
    normed = mixed * inverse * tl.load(norm_weight + line).to(tl.float32) * tl.sigmoid(output_gate)
    tl.store(out + t * width + channel, normed.to(out.dtype.element_ty))
