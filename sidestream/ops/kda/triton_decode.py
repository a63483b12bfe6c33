"""A decode step of Kimi Delta Attention in Triton: low-rank products, then everything over the state.

Floor: the state, read once and written once, 8 * D * D bytes a row and head: 8.4 MB a row at 64 heads of 128, so 2.0 us
at batch 1, 16 at 8, 125 at 64 and 251 at 128 at 4.28 TB/s. All else is 1 % of that.

The second kernel has one program a head of a row. It is launched to overlap with the first and waits for it only where
it takes the products: before, it sends for its state and convolves. What the new state recalls is taken from the old
one, ``q (S + k e) = q S + (q k) e``, so that both products over the state happen in one pass before it changes. The
channels of a head in the convolution ring belong to its program alone, so the ring is read and then written here,
though the row written is the oldest one read. Heads of 128 on Hopper go to ``triton_advance`` where that is faster;
others to the kernel below. At a row or two ``triton_single`` does it all in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sidestream.core.ring import RingPlan
from sidestream.ops.kda import first_use
from sidestream.ops.kda.torch_impl import L2_EPS
from sidestream.ops.kda.triton_advance import MOST_TAPS, WARPS, advance
from sidestream.ops.kda.triton_conv import log_decay
from sidestream.ops.kda.triton_single import single


@dataclass(frozen=True, slots=True)
class Launch:
    """How the kernels are launched.

    Attributes:
        ordered: the second kernel is that of ``triton_advance``, which says its own launch.
        rows: of the step that a program of the first kernel takes, at least 16.
        columns: of the state that the second kernel works on at once, while the next are on their way; if not ordered.
        early: start the first kernel while the one before it ends: its weights never change, so it has them by then.
        releases: let the kernel behind the ordered one start while that ends.
        parts: programs a head in the kernel of ``triton_single``, which is then the only one; 0 where it is not used.
    """

    ordered: bool
    rows: int = 16
    columns: int = 64
    early: bool = False
    releases: bool = False
    parts: int = 0


PLAIN, ORDERED = Launch(ordered=False), Launch(ordered=True)
"""What is launched: the plain kernel everywhere, the ordered one on Hopper for heads of 128."""
PLAIN_ROWS = range(3, 9)
"""Rows for which the plain kernel is faster on Hopper, too: 14.7 against 15.1 us for 4, 29.1 against 29.7 for 8 in a
layer. A row's bits are the same for all numbers of rows in here, for all others up to ``NARROW_ROWS`` but those of
``SINGLE``, and beyond; every graph mode counts alike."""
EARLY_ROWS = 16
"""Most rows for which the ordered kernel's first one starts early: 2.7 us less for one row, 0.2 for 16, none for 64."""
RELEASING_ROWS = 2
"""Most rows for which it lets the kernel behind start while it ends, where ``SINGLE`` is not in use: 0.5 us less in a
layer, 1.5 more for 16."""
SINGLE = {1: replace(ORDERED, releases=True, parts=2), 2: replace(ORDERED, releases=True, parts=1)}
"""By rows, launches of the kernel of ``triton_single`` where it is faster: 7.0 against 9.5 us for one in a layer, 9.0
against 11.7 for two. Each is a form of its own; it is in use if it agrees with the plain kernel, for what
``single_takes``."""
NARROW_ROWS = 64
"""Most rows of which a program of the ordered kernel's first one takes 16: for 128, 64 at once take 3 us less."""


@cache
def _hopper(device: torch.device) -> bool:
    """Whether the device copies to shared memory on its own, and starts kernels before the one in front has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def takes(
    projected: torch.Tensor, conv_state: torch.Tensor, state: torch.Tensor, expand: torch.Tensor, plan: RingPlan
) -> bool:
    """Whether the kernel runs these: heads of 16 to 128, one dtype, a convolution of 2 taps or more."""
    fits = expand.shape[2] in (16, 32, 64, 128) and 2 <= plan.window <= plan.length + 1
    whole = conv_state.is_contiguous() and state.is_contiguous() and expand.is_contiguous() and projected.stride(1) == 1
    return fits and whole and projected.dtype == conv_state.dtype == expand.dtype


def single_takes(projected: torch.Tensor) -> bool:
    """Whether the kernel of ``triton_single`` reads such rows: of 16 bits a number, each aligned for Triton to know."""
    return projected.dtype.itemsize == 2 and projected.stride(0) % 16 == 0 and projected.data_ptr() % 16 == 0


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``decode.decode_step``, fp32 from the convolution to the norm; for what ``takes`` allows. Written to ``out``
    [T, H * D], contiguous, if given."""
    T, H, D = projected.shape[0], A_log.numel(), expand.shape[2]
    hopper = _hopper(projected.device)
    if launch is None:
        fits = hopper and D == 128 and plan.window <= MOST_TAPS
        launch = launch_for(projected.device, T, single_takes(projected)) if fits else PLAIN
    early = launch.early and hopper
    first_options: dict[str, bool] = {"launch_pdl": True} if early else {}
    if out is None:
        out = torch.empty(T, H * D, dtype=projected.dtype, device=projected.device)
    memories = (conv_weight, dt_bias, A_log, norm_weight, slots, start)
    numbers = (
        0.0 if lower_bound is None else lower_bound,
        norm_eps,
        projected.stride(0),
        conv_weight.stride(0),
        conv_weight.stride(1),
    )
    constants = (H, L2_EPS, state.shape[1], D, plan.window, plan.length, lower_bound is not None)
    if launch.parts:
        assert hopper, "clusters of programs, on Hopper"
        assert single_takes(projected), (projected.dtype, projected.stride(0))
        tensors = (projected, conv_state, state, out, expand, *memories)
        form, shape = (launch.parts, launch.releases), {"num_warps": 8, "num_ctas": launch.parts}
        single[(H, T)](*tensors, *numbers, *constants, *form, **shape, launch_pdl=True)
        return out
    expanded = torch.empty(2, T, H * D, dtype=torch.float32, device=projected.device)
    _expand[(2 * H, triton.cdiv(T, launch.rows))](
        projected,
        expand,
        expanded,
        projected.stride(0),
        T,
        H,
        D=D,
        ROWS=launch.rows,
        EARLY=early,
        RELEASES=hopper,
        NARROW=projected.is_cuda and projected.dtype != torch.float32,  # Triton's interpreter multiplies fp32 alone
        num_warps=4,
        **first_options,
    )
    given = (projected, conv_state, state, out, expanded, *memories, *numbers, T * H * D, *constants, hopper)
    options: dict[str, bool] = {"launch_pdl": True} if hopper else {}
    if launch.ordered:
        advance[(H, T)](*given, launch.releases and hopper, num_warps=WARPS, **options)
    else:
        _advance[(H, T)](*given, min(launch.columns, D), num_warps=WARPS, **options)
    return out


def launch_for(device: torch.device, rows: int, singly: bool = True) -> Launch:
    """On Hopper, for heads of 128: a kernel in Gluon only if it does there what the plain one does, which is asked
    for any number of rows, since a step that is captured cannot. ``singly``: what ``single_takes`` says."""
    kinds = {"ordered": ORDERED} | {f"single, {launch}": launch for launch in SINGLE.values() if singly}
    plain = partial(decode_step, launch=PLAIN)
    agreed = {
        launch for name, launch in kinds.items() if first_use.agree(name, device, partial(plain, launch=launch), plain)
    }
    launch = usual_launch(rows, singly)
    if launch.parts and launch not in agreed:
        launch = usual_launch(rows, singly=False)
    return launch if launch.parts or ORDERED in agreed else PLAIN


def usual_launch(rows: int, singly: bool = True) -> Launch:
    """What was fastest for so many rows on an H200; ``singly``: what ``single_takes`` says."""
    if singly and rows in SINGLE:
        return SINGLE[rows]
    if rows in PLAIN_ROWS:
        return PLAIN
    early, releases = rows <= EARLY_ROWS, rows <= RELEASING_ROWS
    return replace(ORDERED, rows=16 if rows <= NARROW_ROWS else 64, early=early, releases=releases)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def _expand(
    projected: tl.tensor,
    expand: tl.tensor,
    expanded: tl.tensor,
    row: tl.tensor,
    T: tl.tensor,
    H: tl.tensor,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
    RELEASES: tl.constexpr,
    NARROW: tl.constexpr,
) -> None:
    """Low-rank rows of one gate times one head's outputs: [2, T, H * D] fp32."""
    if RELEASES and not EARLY:
        gdc_launch_dependents()
    half = tl.program_id(0) // H
    head = tl.program_id(0) % H
    t = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    line = tl.arange(0, D)
    weight = tl.load(expand + tl.program_id(0) * (D * D) + line[:, None] * D + line[None, :])
    if EARLY:
        gdc_wait()
        if RELEASES:  # not before: then the second kernel reads what stands before both without a wait
            gdc_launch_dependents()
    place = t[:, None] * row + (3 * H + half) * D + line[None, :]
    low = tl.load(projected + place, mask=(t < T)[:, None], other=0.0)
    if NARROW:
        result = tl.dot(low, tl.trans(weight))
    else:
        result = tl.dot(low.to(tl.float32), tl.trans(weight.to(tl.float32)), input_precision="ieee")
    target = ((half * T + t) * H + head)[:, None] * D + line[None, :]
    tl.store(expanded + target, result, mask=(t < T)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def convolved(
    x: tl.tensor,
    conv_state: tl.tensor,
    conv_weight: tl.tensor,
    first_row: tl.tensor,
    position: tl.tensor,
    channel: tl.tensor,
    width: tl.tensor,
    weight_channel: tl.tensor,
    weight_tap: tl.tensor,
    TAPS: tl.constexpr,
    LENGTH: tl.constexpr,
) -> tl.tensor:
    """silu of the convolution of one token, fp32, oldest tap first. ``x`` holds its own channels; what the ring, from
    ``first_row`` on, holds for positions before the sequence is not read."""
    total = tl.zeros_like(x).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        wanted = position - (TAPS - 1) + tap
        row = first_row + wanted % LENGTH
        past = tl.load(conv_state + row * width + channel, mask=wanted >= 0, other=0.0)
        total += past.to(tl.float32) * tl.load(conv_weight + channel * weight_channel + tap * weight_tap)
    total += x.to(tl.float32) * tl.load(conv_weight + channel * weight_channel + (TAPS - 1) * weight_tap)
    return total * tl.sigmoid(total)


@triton.jit  # type: ignore[untyped-decorator]
def _advance(
    projected: tl.tensor,
    conv_state: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    expanded: tl.tensor,
    conv_weight: tl.tensor,
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
    TAPS: tl.constexpr,
    LENGTH: tl.constexpr,
    BOUNDED: tl.constexpr,
    OVERLAP: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Nothing that an earlier kernel of the step writes is read before ``gdc_wait``, except what came before both."""
    h = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    width = H * D
    line = tl.arange(0, D)

    position = tl.load(start + t)
    slot = tl.load(slots + t).to(tl.int64)
    before = slot * VERSIONS + position % VERSIONS
    after = slot * VERSIONS + (position + 1) % VERSIONS
    old = state + (before * H + h) * D * D
    new = state + (after * H + h) * D * D
    tile = line[:, None] * D + tl.arange(0, COLUMNS)[None, :]  # [K, some of V]
    coming = tl.load(old + tile, mask=position > 0, other=0.0)

    given = projected + t * projected_row
    channel = h * D + line
    low = given + 3 * width
    beta = tl.sigmoid(tl.load(low + 2 * D + h).to(tl.float32))
    x_q = tl.load(given + channel)
    x_k = tl.load(given + width + channel)
    x_v = tl.load(given + 2 * width + channel)
    ring = 3 * width
    first = slot * LENGTH
    q = convolved(
        x_q, conv_state, conv_weight, first, position, channel, ring, weight_channel, weight_tap, TAPS, LENGTH
    )
    k = convolved(
        x_k, conv_state, conv_weight, first, position, width + channel, ring, weight_channel, weight_tap, TAPS, LENGTH
    )
    channel_v = 2 * width + channel
    v = convolved(
        x_v, conv_state, conv_weight, first, position, channel_v, ring, weight_channel, weight_tap, TAPS, LENGTH
    )
    keep = first + position % LENGTH
    tl.debug_barrier()  # the ring row written next is one that other threads have just read
    tl.store(conv_state + keep * ring + channel, x_q)
    tl.store(conv_state + keep * ring + width + channel, x_k)
    tl.store(conv_state + keep * ring + channel_v, x_v)
    if OVERLAP:
        gdc_wait()
    forget = tl.load(expanded + t * width + channel)
    output_gate = tl.load(expanded + expanded_part + t * width + channel)
    rate = tl.exp(tl.load(a_log + h))
    kept = tl.exp(log_decay(forget + tl.load(dt_bias + channel), rate, lower_bound, BOUNDED))
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
