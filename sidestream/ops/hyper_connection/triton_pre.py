"""The collapse of four hyper-connection streams as two Triton kernels: partial products, then everything else.

The first multiplies a block of rows with a share of ``fn`` and leaves sums of that share: 24 products and the square.
The second adds the shares of a row in a fixed order. Some of its programs collapse and norm a row each, others iterate
Sinkhorn, which nothing waits for but ``hyper_connection_post``: the two latencies overlap.

Floor at 4 streams of 4,096 bf16: ``fn`` (1.6 MB) and 40 KB a row, 0.4 us at batch 1 and 1.0 us at 64; the two kernels'
latencies decide: about 2 us each, of which Sinkhorn's 39 dependent divisions are 0.9. Expected: 3.5 us at batch 1, 4.5
at 64 (with ``hyper_connection_post``, 5 and 6.5), 150 us at 8,192.

The number of shares depends on the number of padded rows, so bits do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sidestream.ops.hyper_connection.triton_sinkhorn import spread
from sidestream.ops.triton_rounding import bf16_terms, narrowed, rounded

STREAMS = 4
COLUMNS = 32
"""Of a share: pre [4], post [4], comb [16], the sum of squares, then nothing."""
MAX_HIDDEN = 8192


@dataclass(frozen=True, slots=True)
class Launch:
    """How the two kernels are launched.

    Attributes:
        block: rows that a program multiplies: 1, on the plain units and in one step, or a power of two from 16 on.
        shares: parts of ``fn``.
        depth: elements of a share multiplied at once.
        warps: of the products; finish_warps: of the second kernel.
        sinkhorn_rows: that one program iterates, 1 or a power of two.
        overlap: start the second kernel while the first runs (programmatic dependent launch); it waits before it reads
            what the first writes.
        early: start the first kernel, likewise, while the kernel before it ends.
        late: let the kernel behind each start once it has waited, not at once: kernels that start each other without
            waiting pile up, and crowd where there is room first.
        factors: Sinkhorn iterates factors of rows and columns rather than the matrix.
    """

    block: int
    shares: int
    depth: int
    warps: int
    finish_warps: int
    sinkhorn_rows: int = 1
    overlap: bool = False
    early: bool = False
    factors: bool = False
    late: bool = False


def launch_for(rows: int, width: int) -> Launch:
    """Swept on an H200. Sinkhorn's programs repeat their work in each warp, so four warps: one for each scheduler. At
    least eight shares: the fewer terms a matrix unit adds up in a row, the less of fp32 it loses. Factors were timed up
    to 16 rows."""
    if rows <= 2 and width <= 128 * 128:
        return Launch(block=1, shares=128, depth=128, warps=4, finish_warps=4, overlap=True, early=True, factors=True)
    if rows <= 16:
        return Launch(block=16, shares=128, depth=128, warps=4, finish_warps=4, overlap=True, early=True, factors=True)
    if rows <= 128:
        return Launch(block=64, shares=128, depth=128, warps=4, finish_warps=4, overlap=True)
    if rows <= 512:
        return Launch(block=32, shares=16, depth=128, warps=4, finish_warps=4)
    return Launch(block=64, shares=8, depth=64, warps=4, finish_warps=4, sinkhorn_rows=128)


def takes(streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, norm_weight: torch.Tensor) -> bool:
    """Whether the kernels run these: four contiguous streams of at most ``MAX_HIDDEN``."""
    T, S, H = streams.shape
    fp32 = fn.dtype == base.dtype == torch.float32 and fn.is_contiguous() and base.is_contiguous()
    weight = norm_weight.dtype == streams.dtype and norm_weight.stride(1) == 1
    return T > 0 and S == STREAMS and H <= MAX_HIDDEN and streams.is_contiguous() and fp32 and weight


def hyper_connection_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_weight: torch.Tensor,
    norm_eps: float,
    eps: float,
    iters: int,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``torch_impl.hyper_connection_pre``; for what ``takes`` allows. All three results are contiguous."""
    T, S, H = streams.shape
    if launch is None:
        launch = launch_for(T, S * H)
    width = S * H
    steps = triton.cdiv(triton.cdiv(width, launch.depth), launch.shares)
    assert launch.block > 1 or steps == 1, f"a row of {width} in {launch}"
    compiled = isinstance(_products, triton.JITFunction)  # else interpreted, which has no bf16 products
    overlap, early = launch.overlap and compiled, launch.early and compiled
    partials = torch.empty(T, launch.shares, COLUMNS, dtype=torch.float32, device=streams.device)
    _products[(triton.cdiv(T, launch.block), launch.shares)](
        streams,
        fn,
        partials,
        T,
        WIDTH=width,
        BLOCK=launch.block,
        SHARES=launch.shares,
        DEPTH=launch.depth,
        STEPS=steps,
        SPLIT=compiled and streams.dtype == torch.bfloat16,
        OVERLAP=overlap,
        EARLY=early,
        num_warps=launch.warps,
        **({"launch_pdl": True} if early else {}),
    )
    return finish(
        streams, partials, base, norm_weight=norm_weight, norm_eps=norm_eps, eps=eps, iters=iters, launch=launch
    )


def finish(
    streams: torch.Tensor,
    partials: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_weight: torch.Tensor,
    norm_eps: float,
    eps: float,
    iters: int,
    launch: Launch,
    fresh: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The results of ``hyper_connection_pre`` from partial products [T, shares, ``COLUMNS``] of ``streams``, which are
    ``fresh`` if the kernel before wrote them too."""
    T, S, H = streams.shape
    compiled = isinstance(_finish, triton.JITFunction)
    overlap = launch.overlap and compiled
    normed = torch.empty(T, H, dtype=streams.dtype, device=streams.device)
    post = torch.empty(T, S, 1, dtype=torch.float32, device=streams.device)
    mix = torch.empty(T, S, S, dtype=torch.float32, device=streams.device)
    iterating = triton.cdiv(T, launch.sinkhorn_rows)
    _finish[(iterating + T,)](
        partials,
        streams,
        base,
        norm_weight,
        normed,
        post,
        mix,
        norm_eps,
        eps,
        T,
        iterating,
        H=H,
        BLOCK=triton.next_power_of_2(H),
        SHARES=launch.shares,
        ROWS=launch.sinkhorn_rows,
        ITERS=iters,
        FACTORS=launch.factors,
        OVERLAP=overlap,
        FRESH=fresh,
        LATE=launch.late,
        FAST=compiled,
        NARROW=compiled and streams.dtype == torch.bfloat16,
        num_warps=launch.finish_warps,
        **({"launch_pdl": True} if overlap else {}),
    )
    return normed, post, mix


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def _products(
    streams: tl.tensor,
    fn: tl.tensor,
    partials: tl.tensor,
    T: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
    DEPTH: tl.constexpr,
    STEPS: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """partials[row, share]. ``fn`` never changes, so a program that takes all of its share at once has it before it
    waits for the kernel before. ``_finish`` reads streams before it waits, so it may start only behind that."""
    share = tl.program_id(1)
    column = tl.arange(0, 32)
    first = share * STEPS * DEPTH
    k = first + tl.arange(0, DEPTH)
    factor_at = fn + column[:, None] * WIDTH + k[None, :]
    known = (column < 24)[:, None] & (k < WIDTH)[None, :]
    if BLOCK == 1:
        factor = tl.load(factor_at, mask=known, other=0.0)
        _wait(EARLY, OVERLAP)
        one = tl.program_id(0).to(tl.int64)
        alone = tl.load(streams + one * WIDTH + k, mask=k < WIDTH, other=0.0).to(tl.float32)
        sums = tl.sum(factor * alone[None, :], axis=1)
        sums = tl.where(column == 24, tl.sum(alone * alone, axis=0), sums)
        tl.store(partials + (one * SHARES + share) * 32 + column, sums)
    else:
        row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        products = tl.zeros((BLOCK, 32), dtype=tl.float32)
        square = tl.zeros((BLOCK,), dtype=tl.float32)
        if STEPS == 1:
            factor = tl.load(factor_at, mask=known, other=0.0)
            _wait(EARLY, OVERLAP)
            real = (row < T)[:, None] & (k < WIDTH)[None, :]
            x = tl.load(streams + row[:, None] * WIDTH + k[None, :], mask=real, other=0.0)
            square += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
            products = multiplied(x, factor, products, SPLIT)
        else:
            _wait(EARLY, OVERLAP)
            for step in range(STEPS):
                k = first + step * DEPTH + tl.arange(0, DEPTH)
                real = (row < T)[:, None] & (k < WIDTH)[None, :]
                x = tl.load(streams + row[:, None] * WIDTH + k[None, :], mask=real, other=0.0)
                known = (column < 24)[:, None] & (k < WIDTH)[None, :]
                factor = tl.load(fn + column[:, None] * WIDTH + k[None, :], mask=known, other=0.0)
                square += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
                products = multiplied(x, factor, products, SPLIT)
        result = tl.where(column[None, :] == 24, square[:, None], products)
        at = (row[:, None] * SHARES + share) * 32 + column[None, :]
        tl.store(partials + at, result, mask=(row < T)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _wait(EARLY: tl.constexpr, OVERLAP: tl.constexpr) -> None:
    if EARLY:
        gdc_wait()
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def multiplied(x: tl.tensor, factor: tl.tensor, products: tl.tensor, SPLIT: tl.constexpr) -> tl.tensor:
    """products [rows, 32] plus x [rows, depth] through fp32 ``factor`` [32, depth].

    With ``SPLIT`` a factor is three bf16 terms, and matrix units add exact products in fp32.
    """
    if SPLIT:
        high, middle, low = bf16_terms(factor)
        products = tl.dot(x, tl.trans(low), products)
        products = tl.dot(x, tl.trans(middle), products)
        products = tl.dot(x, tl.trans(high), products)
    else:
        products = tl.dot(x.to(tl.float32), tl.trans(factor), products, input_precision="ieee")
    return products


@triton.jit(do_not_specialize=["T", "iterating"])  # type: ignore[untyped-decorator]
def _finish(
    partials: tl.tensor,
    streams: tl.tensor,
    base: tl.tensor,
    norm_weight: tl.tensor,
    normed: tl.tensor,
    post: tl.tensor,
    mix: tl.tensor,
    norm_eps: tl.tensor,
    eps: tl.tensor,
    T: tl.tensor,
    iterating: tl.tensor,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    ITERS: tl.constexpr,
    FACTORS: tl.constexpr,
    OVERLAP: tl.constexpr,
    FRESH: tl.constexpr,
    LATE: tl.constexpr,
    FAST: tl.constexpr,
    NARROW: tl.constexpr,
) -> None:
    """The first ``iterating`` programs take ``ROWS`` rows each through Sinkhorn, the others collapse one row each."""
    program = tl.program_id(0)
    column = tl.arange(0, 32)
    bias = tl.load(base + column, mask=column < 24, other=0.0)
    if OVERLAP and not LATE:
        gdc_launch_dependents()
    if program < iterating:
        if OVERLAP:
            gdc_wait()
        if OVERLAP and LATE:
            gdc_launch_dependents()
        spread(partials, base, bias, post, mix, norm_eps, eps, T, 4 * H, SHARES, ROWS, ITERS, FACTORS, FAST)
    else:
        row = (program - iterating).to(tl.int64)
        h = tl.arange(0, BLOCK)
        x = streams + row * 4 * H + h
        weight = tl.load(norm_weight + h, mask=h < H, other=0.0).to(tl.float32)
        if OVERLAP and FRESH:
            gdc_wait()
        x0 = tl.load(x, mask=h < H, other=0.0)
        x1 = tl.load(x + H, mask=h < H, other=0.0)
        x2 = tl.load(x + 2 * H, mask=h < H, other=0.0)
        x3 = tl.load(x + 3 * H, mask=h < H, other=0.0)
        if OVERLAP and not FRESH:
            gdc_wait()
        if OVERLAP and LATE:
            gdc_launch_dependents()
        share = tl.arange(0, SHARES)
        sums = tl.sum(tl.load(partials + (row * SHARES + share[:, None]) * 32 + column[None, :]), axis=0)
        inverse = tl.rsqrt(tl.sum(tl.where(column == 24, sums, 0.0), axis=0) / (4 * H) + norm_eps)
        pre = tl.sigmoid(sums * inverse + bias) + eps
        total = tl.sum(tl.where(column == 0, pre, 0.0), axis=0) * x0.to(tl.float32)
        total += tl.sum(tl.where(column == 1, pre, 0.0), axis=0) * x1.to(tl.float32)
        total += tl.sum(tl.where(column == 2, pre, 0.0), axis=0) * x2.to(tl.float32)
        total += tl.sum(tl.where(column == 3, pre, 0.0), axis=0) * x3.to(tl.float32)
        total = rounded(total, normed.dtype.element_ty, NARROW)
        scale = tl.rsqrt(tl.sum(total * total, axis=0) / H + norm_eps)
        result = rounded(total * scale, normed.dtype.element_ty, NARROW) * weight
        tl.store(normed + row * H + h, narrowed(result, normed.dtype.element_ty, NARROW), mask=h < H)
