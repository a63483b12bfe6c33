"""New hyper-connection streams and the next collapse in two Triton kernels: one mixes and multiplies.

A program of the first takes a row, or a block of rows on matrix units, and a share of the columns of all four streams:
it mixes them, writes them, and multiplies what it wrote with its share of ``fn``, so that streams are read once and a
launch is saved between two sublayers. The second is that of ``triton_pre``. Floor: ``fn`` (1.6 MB) and 88 KB a row, 0.4
us at batch 1 and 1.7 at 64; two launches and latencies of about 2 us. Measured: 3.6 us at batch 1, 6.1 at 8.

A row's streams are those of ``triton_post``, bit for bit; the collapse sums its shares in another order than
``triton_pre``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sidestream.ops.hyper_connection import triton_post, triton_pre
from sidestream.ops.hyper_connection.triton_post import new_stream, output_arguments, shares
from sidestream.ops.hyper_connection.triton_pre import COLUMNS, Launch
from sidestream.ops.moe.expert_sum import ExpertSum
from sidestream.ops.moe.triton_sum import expert_sum
from sidestream.ops.triton_rounding import bf16_terms, not_before, rounded

MOST_ROWS = 16
"""More are mixed in one kernel and multiplied in another, which was faster at 32 and 64."""
SHALLOWEST = 16
"""Elements that matrix units multiply at once."""


def launch_for(rows: int, hidden: int) -> Launch:
    """``depth`` is that of a share, a quarter of it from each stream."""
    latencies: dict[str, Any] = {"overlap": True, "early": True, "factors": True}
    if rows <= 2:
        return Launch(block=1, shares=64, depth=hidden // 16, warps=4, finish_warps=4, **latencies)
    shares, late = (128, False) if rows <= 16 else (64, True)
    return Launch(block=16, shares=shares, depth=4 * hidden // shares, warps=4, finish_warps=4, late=late, **latencies)


def takes(
    streams: torch.Tensor,
    output: torch.Tensor | ExpertSum,
    fn: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
) -> bool:
    """Whether the kernels run these: what ``triton_post`` and ``triton_pre`` take, in few rows of suitable width."""
    T, _, H = streams.shape
    both = triton_post.takes(streams, output) and triton_pre.takes(streams, fn, base, norm_weight)
    return both and T <= MOST_ROWS and _fits(H, launch_for(T, H))


def _fits(hidden: int, launch: Launch) -> bool:
    width = hidden // launch.shares
    whole = hidden % launch.shares == 0 and launch.depth == 4 * width and width & (width - 1) == 0
    return whole and (launch.block == 1 or launch.depth >= SHALLOWEST)


def hyper_connection_post_pre(
    streams: torch.Tensor,
    output: torch.Tensor | ExpertSum,
    post: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    *,
    mix: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    eps: float,
    iters: int,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``torch_impl.hyper_connection_post_pre``; for what ``takes`` allows. All results are contiguous."""
    if launch is None:
        launch = launch_for(streams.shape[0], streams.shape[2])
    out, partials = mixed(streams, output, post, fn, mix=mix, launch=launch)
    collapsed = triton_pre.finish(
        out,
        partials,
        base,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        eps=eps,
        iters=iters,
        launch=launch,
        fresh=True,
    )
    return (out, *collapsed)


def mixed(
    streams: torch.Tensor,
    output: torch.Tensor | ExpertSum,
    post: torch.Tensor,
    fn: torch.Tensor,
    *,
    mix: torch.Tensor,
    launch: Launch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New streams, and their partial products as ``triton_pre.finish`` takes them."""
    T, _, H = streams.shape
    assert _fits(H, launch), f"streams of {H} in {launch}"
    compiled = isinstance(_mix_and_multiply, triton.JITFunction)  # else interpreted, which has no bf16 products
    early, fast = launch.early and compiled, compiled and streams.dtype == torch.bfloat16
    out = torch.empty_like(streams)
    partials = torch.empty(T, launch.shares, COLUMNS, dtype=torch.float32, device=streams.device)
    read, choice = output_arguments(output)
    tensors = (streams, read, post, mix, fn, out, partials)
    strides = (read.stride(0), post.stride(0), post.stride(1), *mix.stride())
    cut: dict[str, Any] = {"H": H, "SHARES": launch.shares, "WIDTH": H // launch.shares, "FAST": fast, "EARLY": early}
    cut.update(choice)
    options: dict[str, Any] = {"num_warps": launch.warps, **({"launch_pdl": True} if early else {})}
    if launch.block == 1:
        _mix_and_multiply[(T, launch.shares)](*tensors, *strides, **cut, **options)
    else:
        grid = (triton.cdiv(T, launch.block), launch.shares)
        overlap = launch.overlap and compiled
        _mix_and_multiply_rows[grid](
            *tensors, *strides, T, BLOCK=launch.block, OVERLAP=overlap, LATE=launch.late, **cut, **options
        )
    return out, partials


@triton.jit  # type: ignore[untyped-decorator]
def _mix_and_multiply(
    streams: tl.tensor,
    output: tl.tensor,
    post: tl.tensor,
    mix: tl.tensor,
    fn: tl.tensor,
    out: tl.tensor,
    partials: tl.tensor,
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
    SHARES: tl.constexpr,
    WIDTH: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """out as ``triton_post`` has it, and partials[row, share] as ``triton_pre`` has them, of WIDTH columns a stream."""
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    h = share * WIDTH + tl.arange(0, WIDTH)
    column = tl.arange(0, 32)
    used = (column < 24)[:, None] & (h >= 0)[None, :]
    factor = fn + column[:, None] * (4 * H) + h[None, :]
    # fn never changes, so it need not wait for the kernel before.
    f0 = tl.load(factor, mask=used, other=0.0)
    f1 = tl.load(factor + H, mask=used, other=0.0)
    f2 = tl.load(factor + 2 * H, mask=used, other=0.0)
    f3 = tl.load(factor + 3 * H, mask=used, other=0.0)
    if EARLY:
        gdc_wait()
    x = streams + row * (4 * H) + h
    x0 = tl.load(x).to(tl.float32)
    x1 = tl.load(x + H).to(tl.float32)
    x2 = tl.load(x + 2 * H).to(tl.float32)
    x3 = tl.load(x + 3 * H).to(tl.float32)
    if TOP_K > 0:
        total = tl.zeros([WIDTH], tl.float32)
        total = expert_sum(output, weights, ids, row, h, h >= 0, tl.num_programs(0), total, H, TOP_K, SHARED)
        given = rounded(total, out.dtype.element_ty, FAST)
    else:
        given = tl.load(output + row * output_row + h).to(tl.float32)
    mix += row * mix_row
    post += row * post_row
    s0 = shares(mix, post, mix_from)
    s1 = shares(mix + mix_to, post + post_stream, mix_from)
    s2 = shares(mix + 2 * mix_to, post + 2 * post_stream, mix_from)
    s3 = shares(mix + 3 * mix_to, post + 3 * post_stream, mix_from)
    n0 = new_stream(x0, x1, x2, x3, given, s0, out, FAST)
    n1 = new_stream(x0, x1, x2, x3, given, s1, out, FAST)
    n2 = new_stream(x0, x1, x2, x3, given, s2, out, FAST)
    n3 = new_stream(x0, x1, x2, x3, given, s3, out, FAST)
    written = out + row * (4 * H) + h
    tl.store(written, n0)
    tl.store(written + H, n1)
    tl.store(written + 2 * H, n2)
    tl.store(written + 3 * H, n3)
    w0, w1, w2, w3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
    square = tl.sum((w0 * w0 + w1 * w1) + (w2 * w2 + w3 * w3), axis=0)
    summed = (f0 * w0[None, :] + f1 * w1[None, :]) + (f2 * w2[None, :] + f3 * w3[None, :])
    result = tl.where(column == 24, square, tl.sum(summed, axis=1))
    tl.store(partials + (row * SHARES + share) * 32 + column, result)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def _mix_and_multiply_rows(
    streams: tl.tensor,
    output: tl.tensor,
    post: tl.tensor,
    mix: tl.tensor,
    fn: tl.tensor,
    out: tl.tensor,
    partials: tl.tensor,
    output_row: tl.tensor,
    post_row: tl.tensor,
    post_stream: tl.tensor,
    mix_row: tl.tensor,
    mix_to: tl.tensor,
    mix_from: tl.tensor,
    T: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
    WIDTH: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
    LATE: tl.constexpr,
) -> None:
    """``_mix_and_multiply`` of BLOCK rows on matrix units. With ``FAST`` a factor is three bf16 terms, as in
    ``triton_pre.multiplied``."""
    if OVERLAP and not LATE:
        gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    share = tl.program_id(1)
    h = share * WIDTH + tl.arange(0, WIDTH)
    column = tl.arange(0, 32)
    k = tl.arange(0, 4 * WIDTH)
    factor_at = fn + (k // WIDTH * H + share * WIDTH + k % WIDTH)[:, None] + column[None, :] * (4 * H)
    # fn never changes, so it need not wait for the kernel before.
    factor = tl.load(factor_at, mask=(column < 24)[None, :] & (k >= 0)[:, None], other=0.0)
    if EARLY:
        gdc_wait()
    there = row < T
    known = tl.minimum(row, T - 1).to(tl.int64)[:, None]
    x = streams + known * (4 * H) + h[None, :]
    x0 = tl.load(x).to(tl.float32)
    x1 = tl.load(x + H).to(tl.float32)
    x2 = tl.load(x + 2 * H).to(tl.float32)
    x3 = tl.load(x + 3 * H).to(tl.float32)
    if TOP_K > 0:
        total = tl.zeros([BLOCK, WIDTH], tl.float32)
        at, all_of = h[None, :], (h >= 0)[None, :]
        total = expert_sum(output, weights, ids, known, at, all_of, T, total, H, TOP_K, SHARED)
        given = rounded(total, out.dtype.element_ty, FAST)
    else:
        given = tl.load(output + known * output_row + h[None, :]).to(tl.float32)
    mix += known * mix_row
    post += known * post_row
    s0 = shares(mix, post, mix_from)
    s1 = shares(mix + mix_to, post + post_stream, mix_from)
    s2 = shares(mix + 2 * mix_to, post + 2 * post_stream, mix_from)
    s3 = shares(mix + 3 * mix_to, post + 3 * post_stream, mix_from)
    if OVERLAP and LATE:
        gdc_launch_dependents()
    if FAST:
        high, middle, low = bf16_terms(not_before(factor))
    n0 = new_stream(x0, x1, x2, x3, given, s0, out, FAST)
    n1 = new_stream(x0, x1, x2, x3, given, s1, out, FAST)
    n2 = new_stream(x0, x1, x2, x3, given, s2, out, FAST)
    n3 = new_stream(x0, x1, x2, x3, given, s3, out, FAST)
    written = out + known * (4 * H) + h[None, :]
    tl.store(written, n0, mask=there[:, None])
    tl.store(written + H, n1, mask=there[:, None])
    tl.store(written + 2 * H, n2, mask=there[:, None])
    tl.store(written + 3 * H, n3, mask=there[:, None])
    w0, w1, w2, w3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
    square = tl.sum((w0 * w0 + w1 * w1) + (w2 * w2 + w3 * w3), axis=1)
    at = partials + (row * SHARES + share) * 32
    last = tl.arange(0, 8)
    tl.store(at[:, None] + 24 + last[None, :], tl.where(last[None, :] == 0, square[:, None], 0.0), mask=there[:, None])
    tile = tl.join(tl.join(n0, n2), tl.join(n1, n3)).permute(0, 2, 3, 1).reshape(BLOCK, 4 * WIDTH)
    nothing = tl.zeros((BLOCK, 32), dtype=tl.float32)
    if FAST:
        # Nothing: it keeps the compiler from mixing streams a second time, in the layout of the products.
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tl.bfloat16, is_pure=False, pack=2)
        products = tl.dot(tile, low, nothing) + tl.dot(tile, middle, nothing)
        products += tl.dot(tile, high, nothing)
    else:
        products = tl.dot(tile.to(tl.float32), factor, nothing, input_precision="ieee")
    kept = there[:, None] & (column < 24)[None, :]
    tl.store(at[:, None] + column[None, :], products, mask=kept)
