"""Linear layers of few rows in Triton: one launch that streams the weight once, or two where its depth is split.

A single row is multiplied on the plain units (half an operation a byte is far below their rate), more rows by matrix
units in a tile that holds them all. Nothing is added between programs, and a row meets no other row: its bits depend on
the row, the weight and the launch alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sidestream.ops.linear.launches import Launch

UPCAST = bool(triton.knobs.runtime.interpret)
"""The interpreter multiplies bf16 wrongly."""
SUM_BLOCK = 1024


def takes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the kernels run these: bf16, the weight contiguous at a multiple of 16 bytes, x with adjacent columns."""
    dtypes = x.dtype is weight.dtype is torch.bfloat16 and (bias is None or bias.dtype is torch.bfloat16)
    aligned = weight.is_contiguous() and weight.data_ptr() % 16 == 0 and x.dim() == 2 and x.stride(1) == 1
    return dtypes and aligned and (bias is None or bias.is_contiguous())


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    launch: Launch,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``torch_impl.linear``, rounded once, into ``out`` [T, N] of any dtype if given; for what ``takes`` allows
    and at most ``launch.rows`` rows."""
    T, K = x.shape
    N = weight.shape[0]
    assert 0 < T <= launch.rows, f"{T} rows in a launch for {launch.rows}"
    depth = min(launch.depth, K & -K)
    pdl = launch.early and not UPCAST
    if out is None:
        out = torch.empty(T, N, dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(N, launch.columns)
    overlap = {"PDL": pdl, "launch_pdl": pdl}
    if launch.rows == 1:
        _one_row[(blocks,)](
            x, weight, out if bias is None else bias, out, N, K=K, COLUMNS=launch.columns, DEPTH=depth,
            STAGES=launch.stages, BIASED=bias is not None, num_warps=launch.warps, **overlap,
        )  # fmt: skip
        return out
    steps = K // depth
    splits = max(splits for splits in range(1, launch.splits + 1) if steps % splits == 0)
    target = out if splits == 1 else torch.empty(splits, T, N, dtype=torch.float32, device=x.device)
    _some_rows[(blocks, splits)](
        x, weight, out if bias is None else bias, target, T, N, K, x.stride(0), steps // splits, ROWS=launch.rows,
        COLUMNS=launch.columns, DEPTH=depth, STAGES=launch.stages, WHOLE=splits == 1,
        BIASED=bias is not None and splits == 1, UPCAST=UPCAST, num_warps=launch.warps, **overlap,
    )  # fmt: skip
    if splits > 1:
        sum_parts(target, bias, out, early=pdl)
    return out


def sum_parts(parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, early: bool) -> None:
    """out [T, N] = sum of parts [splits, T, N] fp32 in their order, plus the bias."""
    splits, T, N = parts.shape
    _sum_parts[(triton.cdiv(T * N, SUM_BLOCK),)](
        parts, out if bias is None else bias, out, T, N, SPLITS=splits, BLOCK=SUM_BLOCK,
        BIASED=bias is not None, PDL=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip


@triton.jit(do_not_specialize=["N"])  # type: ignore[untyped-decorator]
def _one_row(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    N: tl.tensor,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """out [N]: COLUMNS whole rows of the weight a program."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    at = weight + tl.minimum(column, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    if PDL:
        gdc_wait()
    total = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for step in tl.range(0, K, DEPTH, num_stages=STAGES):
        total += tl.load(at + step).to(tl.float32) * tl.load(x + step + k).to(tl.float32)[None, :]
    if PDL:
        gdc_launch_dependents()  # late, so that programs of the next kernel spread over all multiprocessors
    value = tl.sum(total, 1)
    if BIASED:
        value += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)
    tl.store(out + column, value.to(out.dtype.element_ty), mask=column < N)


@triton.jit(do_not_specialize=["T", "steps"])  # type: ignore[untyped-decorator]
def _some_rows(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    steps: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    BIASED: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """out [T, N], or with several parts of the depth (not ``WHOLE``) sums [parts, T, N] fp32."""
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    known = tl.minimum(column, N - 1).to(tl.int64)
    k = part * (steps * DEPTH) + tl.arange(0, DEPTH)
    x_at = x + row[:, None] * x_stride + k[None, :]
    weight_at = weight + known[None, :] * K + k[:, None]
    real = (row < T)[:, None]
    if PDL:
        gdc_wait()
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        given = tl.load(x_at + step * DEPTH, mask=real, other=0.0)
        factor = tl.load(weight_at + step * DEPTH)
        if UPCAST:
            total = tl.dot(given.to(tl.float32), factor.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(given, factor, total)
    if PDL:
        gdc_launch_dependents()  # late, so that programs of the next kernel spread over all multiprocessors
    if BIASED:
        total += tl.load(bias + known).to(tl.float32)[None, :]
    at = out + (part.to(tl.int64) * T + row[:, None]) * N + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=real & (column < N)[None, :])


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def _sum_parts(
    parts: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """out [T, N] = sum of parts [SPLITS, T, N] in their order, plus the bias."""
    elements = T * N  # a multiple of what N is: accesses stay wide
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(parts + part * elements + at, mask=at < elements, other=0.0)
    if BIASED:
        total += tl.load(bias + at % N, mask=at < elements, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < elements)
