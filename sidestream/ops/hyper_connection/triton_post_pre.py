"""New hyper-connection streams and the next collapse of a row or two in two Triton kernels: one mixes and multiplies.

A program of the first takes a row and a share of the columns of all four streams: it mixes them, writes them, and
multiplies what it wrote with its share of ``fn``, so that streams are read once and a launch is saved between two
sublayers. The second is that of ``triton_pre``. Floor: ``fn`` (1.6 MB), 0.4 us; two launches and latencies of about 2
us. Expected: 5 us at batch 1.

A row's streams are those of ``triton_post``, bit for bit; the collapse sums its shares in another order than
``triton_pre``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sidestream.ops.hyper_connection import triton_post, triton_pre
from sidestream.ops.hyper_connection.triton_post import new_stream
from sidestream.ops.hyper_connection.triton_pre import COLUMNS, Launch

MOST_ROWS = 2
"""More share a program's ``fn`` on matrix units, whose tiles this kernel would have to turn first."""


def launch_for(hidden: int) -> Launch:
    """``depth`` is that of a share, a quarter of it from each stream."""
    return Launch(block=1, shares=64, depth=hidden // 16, warps=4, finish_warps=4, overlap=True, early=True)


def takes(
    streams: torch.Tensor, output: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, norm_weight: torch.Tensor
) -> bool:
    """Whether the kernels run these: what ``triton_post`` and ``triton_pre`` take, in few rows of suitable width."""
    T, _, H = streams.shape
    both = triton_post.takes(streams, output) and triton_pre.takes(streams, fn, base, norm_weight)
    return both and T <= MOST_ROWS and _fits(H, launch_for(H))


def _fits(hidden: int, launch: Launch) -> bool:
    width = hidden // launch.shares
    return launch.block == 1 and hidden % launch.shares == 0 and launch.depth == 4 * width and width & (width - 1) == 0


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
        launch = launch_for(H)
    assert _fits(H, launch), f"streams of {H} in {launch}"
    early = launch.early and isinstance(_mix_and_multiply, triton.JITFunction)
    out = torch.empty_like(streams)
    partials = torch.empty(T, launch.shares, COLUMNS, dtype=torch.float32, device=streams.device)
    _mix_and_multiply[(T, launch.shares)](
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
        H=H,
        SHARES=launch.shares,
        WIDTH=H // launch.shares,
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
    H: tl.constexpr,
    SHARES: tl.constexpr,
    WIDTH: tl.constexpr,
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
    given = tl.load(output + row * output_row + h).to(tl.float32)
    mix += row * mix_row
    post += row * post_row
    n0 = new_stream(x0, x1, x2, x3, given, mix, post, mix_from, out)
    n1 = new_stream(x0, x1, x2, x3, given, mix + mix_to, post + post_stream, mix_from, out)
    n2 = new_stream(x0, x1, x2, x3, given, mix + 2 * mix_to, post + 2 * post_stream, mix_from, out)
    n3 = new_stream(x0, x1, x2, x3, given, mix + 3 * mix_to, post + 3 * post_stream, mix_from, out)
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
