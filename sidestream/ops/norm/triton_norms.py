"""RMS norm, layer norm and gated RMS norm as one Triton kernel each: a program takes whole rows.

Bytes are the floor: each element read once and written once. At 64 rows of 4,096 bf16 that is 1 MB, 0.3 us: launches
are what these cost (about 1.5 us in a graph).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_WIDTH = 16384
"""Widest row that stays in one program's registers."""
TILE = 4096
"""Elements a program of several rows takes."""
PAIRED_ROWS = 1024
"""Up to which two norms share a launch; beyond, where a program takes several rows, they are faster apart."""
COMPILED = not triton.knobs.runtime.interpret
"""Then launched while the kernel before ends (programmatic dependent launch); each waits before it reads."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As ``torch_impl.rms_norm``; for what ``takes`` allows."""
    out, rows, launch = _plan(x)
    if rows:
        _rms_norm[launch.pop("grid")](x, weight, out, rows, eps, **launch)
    return out


def add_rms_norm(
    x: torch.Tensor, output: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``torch_impl.add_rms_norm``; for x [T, D] that ``takes`` allows with ``output``."""
    out, rows, launch = _plan(x)
    total = torch.empty_like(out)
    if rows:
        grid = launch.pop("grid")
        _add_rms_norm[grid](x, output, weight, total, out, rows, eps, output_outer=output.stride(0), **launch)
    return total, out


def rms_norm_pair(
    x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, other_weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``torch_impl.rms_norm_pair``; for x [T, D] and other [U, E] that ``takes`` allows."""
    rows, widths = (len(x), len(other)), (x.shape[1], other.shape[1])
    normed, other_normed = (
        torch.empty(size, width, dtype=x.dtype, device=x.device) for size, width in zip(rows, widths, strict=True)
    )
    if max(rows):
        _rms_norm_pair[(max(rows), 2)](
            x, other, weight, other_weight, normed, other_normed, *rows, eps, x.stride(0), other.stride(0),
            WIDTH=widths[0], OTHER_WIDTH=widths[1], BLOCK=triton.next_power_of_2(widths[0]),
            OTHER_BLOCK=triton.next_power_of_2(widths[1]), PDL=COMPILED, launch_pdl=COMPILED, num_warps=4,
        )  # fmt: skip
    return normed, other_normed


def mean_rms_norm(streams: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As ``torch_impl.mean_rms_norm``; for streams [T, S, D] that ``takes`` allows."""
    T, S, width = streams.shape
    out = torch.empty(T, width, dtype=streams.dtype, device=streams.device)
    if T:
        _mean_rms_norm[(T,)](
            streams, weight, out, eps, streams.stride(0), streams.stride(1), STREAMS=S, WIDTH=width,
            BLOCK=triton.next_power_of_2(width), PDL=COMPILED, launch_pdl=COMPILED, num_warps=8 if width > 2048 else 4,
        )  # fmt: skip
    return out


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float) -> torch.Tensor:
    """As ``torch_impl.layer_norm``; for what ``takes`` allows."""
    out, rows, launch = _plan(x)
    if rows:
        _layer_norm[launch.pop("grid")](x, weight, bias, out, rows, eps, **launch)
    return out


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As ``torch_impl.gated_rms_norm``; for what ``takes`` allows of both ``x`` and ``gate``. Written to ``out``,
    as large as x and contiguous, if given."""
    out, rows, launch = _plan(x, out)
    if rows:
        strides = {"gate_outer": gate.stride(0), "gate_inner": gate.stride(-2)}
        _gated_rms_norm[launch.pop("grid")](x, gate, weight, out, rows, eps, **strides, **launch)
    return out


def takes(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether the kernels take rows of x [T, D] or [T, H, D] at any row strides, with weights of its dtype."""
    shaped = 2 <= x.dim() <= 3 and 0 < x.shape[-1] <= MAX_WIDTH and x.stride(-1) == 1
    return shaped and all(other.dtype == x.dtype and other.stride(-1) == 1 for other in others)


def _plan(x: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, int, dict[str, Any]]:
    """(result, rows, arguments that say where rows stand and how many a program takes)."""
    width = x.shape[-1]
    rows = x.numel() // width
    block = triton.next_power_of_2(width)
    together = max(1, TILE // block)  # whatever the rows: no number of them may ask for a compilation of its own
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch = {
        "grid": (triton.cdiv(rows, together),),
        "outer": x.stride(0),
        "inner": x.stride(-2),
        "INNER": x.shape[1] if x.dim() == 3 else 1,
        "WIDTH": width,
        "BLOCK": block,
        "ROWS": together,
        "PDL": COMPILED,
        "launch_pdl": COMPILED,
        "num_warps": 8 if together * block > 2048 else 4,
    }
    return out, rows, launch


@triton.jit  # type: ignore[untyped-decorator]
def _wait(PDL: tl.constexpr) -> None:
    """Let the kernel behind start, and wait for the one before."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def _places(rows: tl.tensor, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Rows of this program [ROWS, 1], columns [1, BLOCK], which of them exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    return row, column, (row < rows) & (column < WIDTH)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _rms_norm(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    outer: tl.tensor,
    inner: tl.tensor,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    _wait(PDL)
    row, column, real = _places(rows, ROWS, BLOCK, WIDTH)
    at = (row // INNER) * outer + (row % INNER) * inner + column
    wide = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / WIDTH + eps)
    normed = (wide * inverse).to(out.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (normed * scale).to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _add_rms_norm(
    x: tl.tensor,
    output: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    output_outer: tl.tensor,
    outer: tl.tensor,
    inner: tl.tensor,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    _wait(PDL)
    row, column, real = _places(rows, ROWS, BLOCK, WIDTH)
    wide = tl.load(x + row * outer + column, mask=real, other=0.0).to(tl.float32)
    wide += tl.load(output + row * output_outer + column, mask=real, other=0.0).to(tl.float32)
    rounded = wide.to(out.dtype.element_ty)
    tl.store(total + row * WIDTH + column, rounded, mask=real)
    wide = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / WIDTH + eps)
    normed = (wide * inverse).to(out.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (normed * scale).to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows", "other_rows"])  # type: ignore[untyped-decorator]
def _rms_norm_pair(
    x: tl.tensor,
    other: tl.tensor,
    weight: tl.tensor,
    other_weight: tl.tensor,
    out: tl.tensor,
    other_out: tl.tensor,
    rows: tl.tensor,
    other_rows: tl.tensor,
    eps: tl.tensor,
    outer: tl.tensor,
    other_outer: tl.tensor,
    WIDTH: tl.constexpr,
    OTHER_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHER_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program takes a row of one of both."""
    _wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        if row < rows:
            _norm_row(x + row * outer, weight, out + row * WIDTH, eps, WIDTH, BLOCK)
    elif row < other_rows:
        _norm_row(other + row * other_outer, other_weight, other_out + row * OTHER_WIDTH, eps, OTHER_WIDTH, OTHER_BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_row(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    column = tl.arange(0, BLOCK)
    real = column < WIDTH
    wide = tl.load(x + column, mask=real, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    normed = (wide * inverse).to(out.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out + column, (normed * scale).to(out.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _mean_rms_norm(
    streams: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    outer: tl.tensor,
    inner: tl.tensor,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program takes a row."""
    column = tl.arange(0, BLOCK)
    real = column < WIDTH
    scale = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    _wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for stream in tl.static_range(STREAMS):
        total += tl.load(streams + row * outer + stream * inner + column, mask=real, other=0.0).to(tl.float32)
    wide = (total / STREAMS).to(out.dtype.element_ty).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    normed = (wide * inverse).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + column, (normed * scale).to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _layer_norm(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    outer: tl.tensor,
    inner: tl.tensor,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    _wait(PDL)
    row, column, real = _places(rows, ROWS, BLOCK, WIDTH)
    at = (row // INNER) * outer + (row % INNER) * inner + column
    wide = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    mean = tl.sum(wide, axis=1, keep_dims=True) / WIDTH
    centred = tl.where(column < WIDTH, wide - mean, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / WIDTH + eps)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (centred * inverse * scale + shift).to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _gated_rms_norm(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    gate_outer: tl.tensor,
    gate_inner: tl.tensor,
    outer: tl.tensor,
    inner: tl.tensor,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    _wait(PDL)
    row, column, real = _places(rows, ROWS, BLOCK, WIDTH)
    at = (row // INNER) * outer + (row % INNER) * inner + column
    wide = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    gate_at = (row // INNER) * gate_outer + (row % INNER) * gate_inner + column
    opened = tl.sigmoid(tl.load(gate + gate_at, mask=real, other=0.0).to(tl.float32))
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / WIDTH + eps)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (wide * inverse * scale * opened).to(out.dtype.element_ty), mask=real)
