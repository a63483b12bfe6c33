"""One small product a head, of few rows, in Triton: weights are read once, and results lie as rows do.

Floor at 64 heads of 256 x 512 bf16: 16.8 MB, 3.9 us at 4.28 TB/s; a launch on top, predicted 6 us. A library's batched
product wants heads first, and copies before and after it for more than one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

UPCAST = bool(triton.knobs.runtime.interpret)
"""The interpreter multiplies bf16 wrongly."""
ROWS = 16
"""Most rows: a tile of matrix units."""
COLUMNS, DEPTH, WARPS, STAGES = 64, 64, 4, 4


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel runs these: bf16, at most ``ROWS`` rows of adjacent elements, weights adjacent one way."""
    dtypes = x.dtype is weight.dtype is torch.bfloat16
    adjacent = x.stride(2) == 1 and 1 in weight.stride()[1:]
    return dtypes and adjacent and 0 < x.shape[0] <= ROWS and x.shape[2] % 32 == 0


def per_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As ``torch_impl.per_head``, contiguous; for what ``takes`` allows."""
    T, heads, K = x.shape
    N = weight.shape[2]
    out = torch.empty(T, heads, N, dtype=x.dtype, device=x.device)
    _per_head[(heads, triton.cdiv(N, COLUMNS))](
        x, weight, out, T, x.stride(0), x.stride(1), *weight.stride(), K=K, N=N, ROWS=ROWS, COLUMNS=COLUMNS,
        DEPTH=min(DEPTH, K & -K), STAGES=STAGES, UPCAST=UPCAST, PDL=not UPCAST, num_warps=WARPS,
        launch_pdl=not UPCAST,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def _per_head(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    T: int,
    x_row: int,
    x_head: int,
    weight_head: int,
    weight_depth: int,
    weight_column: int,
    K: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """out [T, heads, N]: all rows, one head and COLUMNS of N a program."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    real = (row < T)[:, None]
    x_at = x + head * x_head + row[:, None] * x_row + k[None, :]
    known = column if N % COLUMNS == 0 else tl.minimum(column, N - 1)  # a minimum hides that columns are neighbours
    weight_at = weight + head * weight_head + k[:, None] * weight_depth + known[None, :] * weight_column
    if PDL:
        gdc_wait()
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in tl.range(0, K, DEPTH, num_stages=STAGES):
        given = tl.load(x_at + step, mask=real, other=0.0)
        factor = tl.load(weight_at + step * weight_depth)
        if UPCAST:
            total = tl.dot(given.to(tl.float32), factor.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(given, factor, total)
    if PDL:
        gdc_launch_dependents()
    at = out + (row[:, None].to(tl.int64) * tl.num_programs(0) + head) * N + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=real & (column < N)[None, :])
