"""New hyper-connection streams as one Triton kernel: a program mixes some columns of a row's four streams.

An output that is yet to be summed (``ExpertSum``) is summed on the way, as the kernel of ``triton_sum`` does it.

Floor at 4 streams of 4,096 bf16: 72 KB a row, 17 ns; a launch (about 1.5 us) up to 64 rows, 140 us at 8,192.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sidestream.ops.moe.expert_sum import ExpertSum
from sidestream.ops.moe.triton_sum import expert_sum
from sidestream.ops.triton_rounding import narrowed, rounded

STREAMS = 4


@dataclass(frozen=True, slots=True)
class Launch:
    """``columns`` that a program takes, its ``warps``; ``early``: started while the kernel before it ends
    (programmatic dependent launch), it waits before it reads; ``ahead``: except streams, which were there before the
    collapse of this sublayer began, and with it whatever was launched since."""

    columns: int
    warps: int
    early: bool = False
    ahead: bool = False


def launch_for(rows: int) -> Launch:
    """Swept on an H200. Streams ahead take 0.2 us less from 32 rows on, a variant more to compile, and a kernel that
    lets none start before streams are whole, as ``triton_post_pre`` does unless it is late."""
    return Launch(columns=512, warps=4, early=True) if rows <= 128 else Launch(columns=1024, warps=4)


def takes(streams: torch.Tensor, output: torch.Tensor | ExpertSum) -> bool:
    """Whether the kernel runs these: four contiguous streams, an output of their dtype."""
    same = streams.dtype == output.dtype and (isinstance(output, ExpertSum) or output.stride(1) == 1)
    return streams.numel() > 0 and streams.shape[1] == STREAMS and streams.is_contiguous() and same


def output_arguments(output: torch.Tensor | ExpertSum) -> tuple[torch.Tensor, dict[str, Any]]:
    """Arguments ``output`` and others by which kernels read a sublayer's output or sum it."""
    if isinstance(output, torch.Tensor):
        return output, {"weights": None, "ids": None, "TOP_K": 0, "SHARED": 0}
    choice: dict[str, Any] = {"weights": output.weights, "ids": output.ids}
    return output.partial, {**choice, "TOP_K": output.ids.shape[1], "SHARED": output.num_shared}


def hyper_connection_post(
    streams: torch.Tensor,
    output: torch.Tensor | ExpertSum,
    post: torch.Tensor,
    *,
    mix: torch.Tensor,
    launch: Launch | None = None,
) -> torch.Tensor:
    """As ``torch_impl.hyper_connection_post``, rounded once; for what ``takes`` allows."""
    T, _, H = streams.shape
    if launch is None:
        launch = launch_for(T)
    compiled = isinstance(_mix, triton.JITFunction)
    early = launch.early and compiled
    out = torch.empty_like(streams)
    read, choice = output_arguments(output)
    _mix[(T, triton.cdiv(H, launch.columns))](
        streams,
        read,
        post,
        mix,
        out,
        read.stride(0),
        post.stride(0),
        post.stride(1),
        *mix.stride(),
        **choice,
        H=H,
        BLOCK=launch.columns,
        EARLY=early,
        AHEAD=launch.ahead,
        FAST=compiled and streams.dtype == torch.bfloat16,
        num_warps=launch.warps,
        **({"launch_pdl": True} if early else {}),
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _mix(
    streams: tl.tensor,
    output: tl.tensor,
    post: tl.tensor,
    mix: tl.tensor,
    out: tl.tensor,
    output_row: tl.tensor,
    post_row: tl.tensor,
    post_stream: tl.tensor,
    mix_row: tl.tensor,
    mix_to: tl.tensor,
    mix_from: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    """With ``TOP_K`` the output is pending: ``output`` holds the rows that ``weights`` and ``ids`` make it of."""
    if EARLY and not AHEAD:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = h < H
    x = streams + row * 4 * H + h
    x0 = tl.load(x, mask=real, other=0.0).to(tl.float32)
    x1 = tl.load(x + H, mask=real, other=0.0).to(tl.float32)
    x2 = tl.load(x + 2 * H, mask=real, other=0.0).to(tl.float32)
    x3 = tl.load(x + 3 * H, mask=real, other=0.0).to(tl.float32)
    if EARLY and AHEAD:
        gdc_wait()
    if TOP_K > 0:
        given = tl.zeros([BLOCK], tl.float32)
        given = expert_sum(output, weights, ids, row, h, real, tl.num_programs(0), given, H, TOP_K, SHARED)
        given = rounded(given, out.dtype.element_ty, FAST)
    else:
        given = tl.load(output + row * output_row + h, mask=real, other=0.0).to(tl.float32)
    mix += row * mix_row
    post += row * post_row
    if EARLY:
        gdc_launch_dependents()  # not before: programs of the next kernel would crowd where there is room first
    # All shares are read before anything is written: no load passes a store, and each would be a trip to the L2 cache.
    s0 = shares(mix, post, mix_from)
    s1 = shares(mix + mix_to, post + post_stream, mix_from)
    s2 = shares(mix + 2 * mix_to, post + 2 * post_stream, mix_from)
    s3 = shares(mix + 3 * mix_to, post + 3 * post_stream, mix_from)
    n0 = new_stream(x0, x1, x2, x3, given, s0, out, FAST)
    n1 = new_stream(x0, x1, x2, x3, given, s1, out, FAST)
    n2 = new_stream(x0, x1, x2, x3, given, s2, out, FAST)
    n3 = new_stream(x0, x1, x2, x3, given, s3, out, FAST)
    written = out + row * 4 * H + h
    tl.store(written, n0, mask=real)
    tl.store(written + H, n1, mask=real)
    tl.store(written + 2 * H, n2, mask=real)
    tl.store(written + 3 * H, n3, mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def shares(mix: tl.tensor, post: tl.tensor, mix_from: tl.tensor) -> tl.tensor:
    """What a new stream takes of the four old ones and of the output."""
    first, second = tl.load(mix), tl.load(mix + mix_from)
    third, fourth = tl.load(mix + 2 * mix_from), tl.load(mix + 3 * mix_from)
    return first, second, third, fourth, tl.load(post)


@triton.jit  # type: ignore[untyped-decorator]
def new_stream(
    x0: tl.tensor,
    x1: tl.tensor,
    x2: tl.tensor,
    x3: tl.tensor,
    given: tl.tensor,
    taken: tl.tensor,
    out: tl.tensor,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Columns of a new stream in the dtype of ``out``: those ``shares`` of the old ones and of the output."""
    total = x0 * rounded(taken[0], out.dtype.element_ty, FAST)
    total += x1 * rounded(taken[1], out.dtype.element_ty, FAST)
    total += x2 * rounded(taken[2], out.dtype.element_ty, FAST)
    total += x3 * rounded(taken[3], out.dtype.element_ty, FAST)
    return narrowed(total + 2.0 * (given * rounded(taken[4], out.dtype.element_ty, FAST)), out.dtype.element_ty, FAST)
