"""New hyper-connection streams and the next collapse in two Triton kernels: one mixes and multiplies, one finishes.

A program of the first takes some rows and a share of the columns of all four streams: it mixes them, writes them, and
multiplies what it wrote with its share of ``fn``, so that streams are read once and a launch is saved between two
sublayers. The second is that of ``triton_pre``. Floor as there, less a read of the streams; two launches. Expected: 4.5
us at batch 1 and 7 at 64.

A row's streams are those of ``triton_post``, bit for bit; the collapse sums its shares in another order than
``triton_pre``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sidestream.ops.hyper_connection import triton_post, triton_pre
from sidestream.ops.hyper_connection.triton_pre import COLUMNS, Launch

MOST_ROWS = 128
"""More are bound by bytes, not by launches, and wide tiles multiply them faster."""
LEAST_COLUMNS = 16
"""Of one stream in a share: what a matrix unit takes."""


def launch_for(rows: int) -> Launch:
    """``depth`` is that of a share, a quarter of it from each stream."""
    return Launch(block=16, shares=128, depth=128, warps=4, finish_warps=4, overlap=True, early=True)


def takes(
    streams: torch.Tensor, output: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, norm_weight: torch.Tensor
) -> bool:
    """Whether the kernels run these: what ``triton_post`` and ``triton_pre`` take, in few rows of suitable width."""
    T, _, H = streams.shape
    both = triton_post.takes(streams, output) and triton_pre.takes(streams, fn, base, norm_weight)
    return both and T <= MOST_ROWS and _fits(H, launch_for(T))


def _fits(hidden: int, launch: Launch) -> bool:
    return hidden % launch.shares == 0 and launch.depth == 4 * hidden // launch.shares >= 4 * LEAST_COLUMNS


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
    T, _, H = streams.shape
    if launch is None:
        launch = launch_for(T)
    assert _fits(H, launch), f"streams of {H} in {launch}"
    compiled = isinstance(_mix_and_multiply, triton.JITFunction)  # else interpreted, which has no bf16 products
    early = launch.early and compiled
    out = torch.empty_like(streams)
    partials = torch.empty(T, launch.shares, COLUMNS, dtype=torch.float32, device=streams.device)
    _mix_and_multiply[(triton.cdiv(T, launch.block), launch.shares)](
        streams,
        output,
        post,
        mix,
        fn,
        out,
        partials,
        T,
        output.stride(0),
        post.stride(0),
        post.stride(1),
        *mix.stride(),
        H=H,
        BLOCK=launch.block,
        SHARES=launch.shares,
        WIDTH=H // launch.shares,
        SPLIT=compiled and streams.dtype == torch.bfloat16,
        EARLY=early,
        num_warps=launch.warps,
        **({"launch_pdl": True} if early else {}),
    )
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


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def _mix_and_multiply(
    streams: tl.tensor,
    output: tl.tensor,
    post: tl.tensor,
    mix: tl.tensor,
    fn: tl.tensor,
    out: tl.tensor,
    partials: tl.tensor,
    T: tl.tensor,
    output_row: tl.tensor,
    post_row: tl.tensor,
    post_stream: tl.tensor,
    mix_row: tl.tensor,
    mix_to: tl.tensor,
    mix_from: tl.tensor,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """out as ``triton_post`` has it, and partials[row, share] as ``triton_pre`` has them, of WIDTH columns a stream."""
    if EARLY:
        gdc_launch_dependents()
    dtype = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    share = tl.program_id(1)
    h = share * WIDTH + tl.arange(0, WIDTH)
    column = tl.arange(0, 32)
    used = (column < 24)[:, None] & (h >= 0)[None, :]
    factor_at = fn + column[:, None] * (4 * H) + h[None, :]
    ahead = tl.load(factor_at, mask=used, other=0.0)  # never changes, so it need not wait for the kernel before
    if EARLY:
        gdc_wait()
    here = row < T
    real = here[:, None] & (h >= 0)[None, :]
    x = streams + row[:, None] * (4 * H) + h[None, :]
    x0 = tl.load(x, mask=real, other=0.0).to(tl.float32)
    x1 = tl.load(x + H, mask=real, other=0.0).to(tl.float32)
    x2 = tl.load(x + 2 * H, mask=real, other=0.0).to(tl.float32)
    x3 = tl.load(x + 3 * H, mask=real, other=0.0).to(tl.float32)
    given = tl.load(output + row[:, None] * output_row + h[None, :], mask=real, other=0.0).to(tl.float32)
    mix += row * mix_row
    post += row * post_row
    products = tl.zeros((BLOCK, 32), dtype=tl.float32)
    square = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(4):
        weight = mix + j * mix_to
        total = x0 * tl.load(weight, mask=here, other=0.0).to(dtype).to(tl.float32)[:, None]
        total += x1 * tl.load(weight + mix_from, mask=here, other=0.0).to(dtype).to(tl.float32)[:, None]
        total += x2 * tl.load(weight + 2 * mix_from, mask=here, other=0.0).to(dtype).to(tl.float32)[:, None]
        total += x3 * tl.load(weight + 3 * mix_from, mask=here, other=0.0).to(dtype).to(tl.float32)[:, None]
        placed = given * tl.load(post + j * post_stream, mask=here, other=0.0).to(dtype).to(tl.float32)[:, None]
        new = (total + 2.0 * placed).to(dtype)
        tl.store(out + (row[:, None] * 4 + j) * H + h[None, :], new, mask=real)
        wide = new.to(tl.float32)
        square += tl.sum(wide * wide, axis=1)
        factor = ahead if j == 0 else tl.load(factor_at + j * H, mask=used, other=0.0)
        if SPLIT:
            high = factor.to(tl.bfloat16)
            rest = factor - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            products = tl.dot(new, tl.trans(low), products)
            products = tl.dot(new, tl.trans(middle), products)
            products = tl.dot(new, tl.trans(high), products)
        else:
            products = tl.dot(wide, tl.trans(factor), products, input_precision="ieee")
    result = tl.where(column[None, :] == 24, square[:, None], products)
    at = (row[:, None] * SHARES + share) * 32 + column[None, :]
    tl.store(partials + at, result, mask=here[:, None])
