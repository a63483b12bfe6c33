"""New hyper-connection streams and the next collapse of thousands of rows in two Triton kernels.

A program of the first takes a block of rows and a share of the columns of all four streams, and walks along them: it
mixes some columns, writes them, and multiplies what it wrote with ``fn`` on matrix units, so that streams are not read
for their products alone. Programs of a block's shares follow each other, as their memory does. The second kernel is
that of ``triton_pre``; it begins with the rows written last, of which the L2 cache still holds some.

Floor at 4 streams of 4,096 bf16: 112 KB a row, of which the first kernel moves 72; 219 us at 8,192 rows.

A row's streams are those of ``triton_post``, bit for bit; the collapse sums its shares in another order than
``triton_pre``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from sidestream.ops.hyper_connection import triton_post, triton_pre
from sidestream.ops.hyper_connection.triton_post import new_stream, shares
from sidestream.ops.hyper_connection.triton_pre import COLUMNS, collapse
from sidestream.ops.hyper_connection.triton_sinkhorn import spread
from sidestream.ops.triton_rounding import bf16_terms

MOST_LOOKS = tl.constexpr(1 << 16)
"""At what other programs have done, before a program goes on without them: a fault, but no hang."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How the first kernel is launched, and the second one's order.

    Attributes:
        block: rows of a program, a power of two from 16 on.
        shares: parts of a stream's columns.
        width: columns of each stream that a program works on at once.
        warps: of a program.
        stages: of loads on their way at once.
        registers: of a thread, at most.
        between: the columns of a share lie between those of the others, so that programs that run side by side read
            memory that lies side by side.
        backwards: the second kernel begins with the last row.
        whole: one kernel alone: programs of a block wait for each other, then collapse its rows.
    """

    block: int
    shares: int
    width: int
    warps: int
    stages: int = 1
    registers: int = 255
    between: bool = True
    backwards: bool = True
    whole: bool = False


def launch_for(rows: int) -> Launch:
    """Not timed yet."""
    return Launch(block=64, shares=8, width=64, warps=8)


def takes(
    streams: torch.Tensor, output: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, norm_weight: torch.Tensor
) -> bool:
    """Whether the kernels run these: bf16 that ``triton_post`` and ``triton_pre`` take, of whole shares."""
    T, _, H = streams.shape
    launch = launch_for(T)
    both = triton_post.takes(streams, output) and triton_pre.takes(streams, fn, base, norm_weight)
    return both and streams.dtype == torch.bfloat16 and H % (launch.shares * launch.width) == 0


def hyper_connection_post_pre(
    streams: torch.Tensor,
    output: torch.Tensor,
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
    T, S, H = streams.shape
    if launch is None:
        launch = launch_for(T)
    settings: dict[str, Any] = {"norm_weight": norm_weight, "norm_eps": norm_eps, "eps": eps, "iters": iters}
    if launch.whole:
        return _whole(streams, output, post, fn, base, mix=mix, **settings, launch=launch)
    out, partials = mixed(streams, output, post, fn, mix=mix, launch=launch)
    finish = replace(triton_pre.launch_for(T, S * H), shares=launch.shares, backwards=launch.backwards)
    return (out, *triton_pre.finish(out, partials, base, **settings, launch=finish, fresh=finish.overlap))


def _whole(
    streams: torch.Tensor,
    output: torch.Tensor,
    post: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    *,
    mix: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    eps: float,
    iters: int,
    launch: Launch,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    T, S, H = streams.shape
    steps, rest = divmod(H, launch.shares * launch.width)
    assert rest == 0, f"streams of {H} in {launch}"
    compiled = isinstance(_everything, triton.JITFunction)
    out, normed = torch.empty_like(streams), torch.empty(T, H, dtype=streams.dtype, device=streams.device)
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": streams.device}
    partials = torch.empty(T, launch.shares, COLUMNS, **fp32)
    new_post, new_mix = torch.empty(T, S, 1, **fp32), torch.empty(T, S, S, **fp32)
    blocks = triton.cdiv(T, launch.block)
    counts = torch.zeros(blocks, dtype=torch.int32, device=streams.device)
    # Interpreted programs run one after the other, so that none can wait.
    for mixes, collapses in [(True, True)] if compiled else [(True, False), (False, True)]:
        _everything[(launch.shares, blocks)](
            streams, output, post, mix, fn, out, partials,
            output.stride(0), post.stride(0), post.stride(1), *mix.stride(),
            counts, base, norm_weight, normed, new_post, new_mix, norm_eps, eps, T,
            H=H, COLUMNS=triton.next_power_of_2(H), BLOCK=launch.block, SHARES=launch.shares, WIDTH=launch.width,
            STEPS=steps, STAGES=launch.stages, BETWEEN=launch.between, ITERS=iters, MIXES=mixes, COLLAPSES=collapses,
            FAST=compiled and streams.dtype == torch.bfloat16, num_warps=launch.warps, maxnreg=launch.registers,
        )  # fmt: skip
    return out, normed, new_post, new_mix


def mixed(
    streams: torch.Tensor,
    output: torch.Tensor,
    post: torch.Tensor,
    fn: torch.Tensor,
    *,
    mix: torch.Tensor,
    launch: Launch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New streams, and their partial products as ``triton_pre.finish`` takes them."""
    T, _, H = streams.shape
    steps, rest = divmod(H, launch.shares * launch.width)
    assert rest == 0, f"streams of {H} in {launch}"
    compiled = isinstance(_mix_and_multiply_steps, triton.JITFunction)  # else interpreted, which has no bf16 products
    out = torch.empty_like(streams)
    partials = torch.empty(T, launch.shares, COLUMNS, dtype=torch.float32, device=streams.device)
    _mix_and_multiply_steps[(launch.shares, triton.cdiv(T, launch.block))](
        streams,
        output,
        post,
        mix,
        fn,
        out,
        partials,
        output.stride(0),
        post.stride(0),
        post.stride(1),
        *mix.stride(),
        T,
        H=H,
        BLOCK=launch.block,
        SHARES=launch.shares,
        WIDTH=launch.width,
        STEPS=steps,
        STAGES=launch.stages,
        BETWEEN=launch.between,
        FAST=compiled and streams.dtype == torch.bfloat16,
        num_warps=launch.warps,
        maxnreg=launch.registers,
    )
    return out, partials


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def _mix_and_multiply_steps(
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
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    BETWEEN: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    share, block = tl.program_id(0), tl.program_id(1)
    _mix_and_multiply_block(
        streams, output, post, mix, fn, out, partials, output_row, post_row, post_stream, mix_row, mix_to, mix_from,
        share, block, T, H, BLOCK, SHARES, WIDTH, STEPS, STAGES, BETWEEN, FAST,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _mix_and_multiply_block(
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
    share: tl.tensor,
    block: tl.tensor,
    T: tl.tensor,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    BETWEEN: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    """out as ``triton_post`` has it, and partials[row, share] as ``triton_pre`` has them, of STEPS * WIDTH columns a
    stream. With ``FAST`` a factor is three bf16 terms, as in ``triton_pre.multiplied``."""
    row = block * BLOCK + tl.arange(0, BLOCK)
    there = row < T
    known = tl.minimum(row, T - 1).to(tl.int64)[:, None]
    mix += known * mix_row
    post += known * post_row
    s0 = shares(mix, post, mix_from)
    s1 = shares(mix + mix_to, post + post_stream, mix_from)
    s2 = shares(mix + 2 * mix_to, post + 2 * post_stream, mix_from)
    s3 = shares(mix + 3 * mix_to, post + 3 * post_stream, mix_from)
    column = tl.arange(0, 32)
    k = tl.arange(0, 4 * WIDTH)
    factor_at = fn + (k // WIDTH * H + k % WIDTH)[:, None] + column[None, :] * (4 * H)
    products = tl.zeros((BLOCK, 32), dtype=tl.float32)
    square = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        first = (step * SHARES + share if BETWEEN else share * STEPS + step) * WIDTH
        h = first + tl.arange(0, WIDTH)[None, :]
        x = streams + known * (4 * H) + h
        x0 = tl.load(x, eviction_policy="evict_first").to(tl.float32)
        x1 = tl.load(x + H, eviction_policy="evict_first").to(tl.float32)
        x2 = tl.load(x + 2 * H, eviction_policy="evict_first").to(tl.float32)
        x3 = tl.load(x + 3 * H, eviction_policy="evict_first").to(tl.float32)
        given = tl.load(output + known * output_row + h).to(tl.float32)
        factor = tl.load(factor_at + first, mask=(column < 24)[None, :] & (k >= 0)[:, None], other=0.0)
        n0 = new_stream(x0, x1, x2, x3, given, s0, out, FAST)
        n1 = new_stream(x0, x1, x2, x3, given, s1, out, FAST)
        n2 = new_stream(x0, x1, x2, x3, given, s2, out, FAST)
        n3 = new_stream(x0, x1, x2, x3, given, s3, out, FAST)
        written = out + known * (4 * H) + h
        tl.store(written, n0, mask=there[:, None])
        tl.store(written + H, n1, mask=there[:, None])
        tl.store(written + 2 * H, n2, mask=there[:, None])
        tl.store(written + 3 * H, n3, mask=there[:, None])
        w0, w1, w2, w3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
        square += tl.sum((w0 * w0 + w1 * w1) + (w2 * w2 + w3 * w3), axis=1)
        tile = tl.join(tl.join(n0, n2), tl.join(n1, n3)).permute(0, 2, 3, 1).reshape(BLOCK, 4 * WIDTH)
        if FAST:
            # Nothing: it keeps the compiler from mixing streams a second time, in the layout of the products.
            tile = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [tile], dtype=tl.bfloat16, is_pure=False, pack=2
            )
            high, middle, low = bf16_terms(factor)
            products = tl.dot(tile, low, products)
            products = tl.dot(tile, middle, products)
            products = tl.dot(tile, high, products)
        else:
            products = tl.dot(tile.to(tl.float32), factor, products, input_precision="ieee")
    at = partials + (row.to(tl.int64) * SHARES + share) * 32
    last = tl.arange(0, 8)
    tl.store(at[:, None] + 24 + last[None, :], tl.where(last[None, :] == 0, square[:, None], 0.0), mask=there[:, None])
    kept = there[:, None] & (column < 24)[None, :]
    tl.store(at[:, None] + column[None, :], products, mask=kept)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def _everything(
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
    counts: tl.tensor,
    base: tl.tensor,
    norm_weight: tl.tensor,
    normed: tl.tensor,
    new_post: tl.tensor,
    new_mix: tl.tensor,
    norm_eps: tl.tensor,
    eps: tl.tensor,
    T: tl.tensor,
    H: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    BETWEEN: tl.constexpr,
    ITERS: tl.constexpr,
    MIXES: tl.constexpr,
    COLLAPSES: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    """A program takes a share of a block's columns, then, once all of these are there, a share of its rows."""
    share, block = tl.program_id(0), tl.program_id(1)
    if MIXES:
        _mix_and_multiply_block(
            streams, output, post, mix, fn, out, partials, output_row, post_row, post_stream, mix_row, mix_to, mix_from,
            share, block, T, H, BLOCK, SHARES, WIDTH, STEPS, STAGES, BETWEEN, FAST,
        )  # fmt: skip
    if MIXES and COLLAPSES:
        tl.debug_barrier()
        ready = tl.atomic_add(counts + block, 1, sem="acq_rel") + 1
        looks = 0
        while (ready < SHARES) & (looks < MOST_LOOKS):
            ready = tl.atomic_add(counts + block, 0, sem="acq_rel")
            looks += 1
        tl.debug_barrier()
    if COLLAPSES:
        column = tl.arange(0, 32)
        bias = tl.load(base + column, mask=column < 24, other=0.0)
        h = tl.arange(0, COLUMNS)
        weight = tl.load(norm_weight + h, mask=h < H, other=0.0).to(tl.float32)
        first = block.to(tl.int64) * BLOCK
        for i in range(BLOCK // SHARES):
            row = first + share * (BLOCK // SHARES) + i
            if row < T:
                x = out + row * (4 * H) + h
                x0 = tl.load(x, mask=h < H, other=0.0)
                x1 = tl.load(x + H, mask=h < H, other=0.0)
                x2 = tl.load(x + 2 * H, mask=h < H, other=0.0)
                x3 = tl.load(x + 3 * H, mask=h < H, other=0.0)
                collapse(x0, x1, x2, x3, weight, bias, partials, row, normed, norm_eps, eps, H, COLUMNS, SHARES, FAST)
        if share == SHARES - 1:
            spread(
                partials,
                base,
                bias,
                new_post,
                new_mix,
                first,
                norm_eps,
                eps,
                T,
                4 * H,
                SHARES,
                BLOCK,
                ITERS,
                False,
                FAST,
            )
