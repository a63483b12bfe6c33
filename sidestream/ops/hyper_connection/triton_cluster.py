"""New hyper-connection streams and the next collapse in one launch of thread block clusters (Gluon, Hopper only).

A cluster has a few rows, each of its processors a share of the columns of all four streams: it mixes them, writes them,
keeps them in registers, and multiplies them with its share of ``fn``, which it holds before it waits for the kernel in
front. Sums of shares go through the L2 cache, and a barrier of the cluster stands between; then every processor
collapses its own columns, and one warp of a processor iterates Sinkhorn for one row, while the others exchange sums of
squares for the norm in the same way. So what takes three launches otherwise is one, with two such exchanges.

Tensors have an explicit first dimension, the processor in its cluster. No operation but loads from ``partials`` and
``squares`` reaches across it. Floor: 88 KB a row, and ``fn`` (1.6 MB) a cluster, out of the L2 cache: 12.6 MB for 64
rows, 2 us unless they come while the kernel in front ends. Expected 5.5 us at 64 rows: launch and first loads 2,
products 0.5, two exchanges 1.5, Sinkhorn 1.

A row's streams are those of ``triton_post``, bit for bit; the collapse sums its shares in another order than
``triton_pre`` and ``triton_post_pre``. Which rows share a cluster changes no bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sidestream.ops.hyper_connection import triton_post, triton_pre
from sidestream.ops.hyper_connection.launches import Cluster
from sidestream.ops.hyper_connection.triton_cluster_parts import (
    cluster_arrive,
    cluster_wait,
    iterate,
    narrowed,
    not_before,
    over_processors,
    rank,
    rounded,
    sigmoid,
    warp,
    warp_sums,
)
from sidestream.ops.hyper_connection.triton_cluster_products import (
    factors_in_registers,
    factors_to_memory,
    publish_products,
)
from sidestream.ops.hyper_connection.triton_post import output_arguments
from sidestream.ops.moe.expert_sum import ExpertSum


def takes(
    streams: torch.Tensor,
    output: torch.Tensor | ExpertSum,
    fn: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    launch: Cluster,
) -> bool:
    """Whether the kernel runs these: what ``triton_post`` and ``triton_pre`` take, in bf16, on a Hopper."""
    both = triton_post.takes(streams, output) and triton_pre.takes(streams, fn, base, norm_weight)
    return both and streams.dtype == torch.bfloat16 and fits(streams.shape[2], launch) and _is_hopper(streams.device)


def fits(hidden: int, launch: Cluster) -> bool:
    """Each warp multiplies 64 elements of a processor's share, or 32 of each stream if factors are in shared memory,
    and has two or more of each of its rows."""
    share = hidden // launch.processors
    whole = share & (share - 1) == 0 and hidden % launch.processors == 0
    own = share * launch.rows // (32 * launch.warps)
    rows = launch.rows in (4, 8, 16) and launch.rows <= launch.processors and launch.warps % launch.rows == 0
    return rows and whole and own >= 2 and 4 * share == (128 if launch.held else 64) * launch.warps


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


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
    launch: Cluster,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``torch_impl.hyper_connection_post_pre``; for what ``takes`` allows. All results are contiguous.

    ``fn``, ``base`` and ``norm_weight`` are read while kernels in front still run: none of them may write these.
    """
    T, S, H = streams.shape
    device = streams.device
    new, normed = torch.empty_like(streams), torch.empty(T, H, dtype=streams.dtype, device=device)
    new_post = torch.empty(T, S, 1, dtype=torch.float32, device=device)
    new_mix = torch.empty(T, S, S, dtype=torch.float32, device=device)
    partials = torch.empty(T, launch.processors, triton_pre.COLUMNS, dtype=torch.float32, device=device)
    squares = torch.empty(T, launch.processors, dtype=torch.float32, device=device)
    read, choice = output_arguments(output)
    options: dict[str, Any] = {"num_warps": launch.warps, "num_ctas": launch.processors, "launch_pdl": True}
    if launch.held:
        options["maxnreg"] = 128  # two programs of eight warps a multiprocessor
    _between[(triton.cdiv(T, launch.rows),)](
        streams,
        read,
        post,
        mix,
        fn,
        base,
        norm_weight,
        new,
        normed,
        new_post,
        new_mix,
        partials,
        squares,
        choice["weights"],
        choice["ids"],
        read.stride(0),
        post.stride(0),
        post.stride(1),
        *mix.stride(),
        T,
        norm_eps,
        eps,
        H=H,
        top_k=choice["TOP_K"],
        shared=choice["SHARED"],
        iters=iters,
        R=launch.rows,
        C=launch.processors,
        W=launch.warps,
        terms=launch.terms,
        held=launch.held,
        ahead=launch.ahead,
        late=launch.late,
        **options,
    )
    return new, normed, new_post, new_mix


@gluon.jit
def _taken(mix, post, mix_from):
    """What a new stream takes of the four old ones and of the output, as bf16 has it."""
    first, second = rounded(gl.load(mix)), rounded(gl.load(mix + mix_from))
    third, fourth = rounded(gl.load(mix + 2 * mix_from)), rounded(gl.load(mix + 3 * mix_from))
    return first, second, third, fourth, rounded(gl.load(post))


@gluon.jit
def _new_stream(x0, x1, x2, x3, given, taken):
    total = x0 * taken[0][:, :, None]
    total += x1 * taken[1][:, :, None]
    total += x2 * taken[2][:, :, None]
    total += x3 * taken[3][:, :, None]
    return narrowed(total + 2.0 * (given * taken[4][:, :, None]))


@gluon.jit
def _given(output, weights, ids, row, h, output_row, T, H: gl.constexpr, top_k: gl.constexpr, shared: gl.constexpr):
    """The sublayer's output, fp32, or the sum it is yet to be made of, in the order of ``triton_sum``."""
    if top_k == 0:
        given = gl.load(output + row[:, :, None] * output_row + h).to(gl.float32)
    else:
        given = (h + row[:, :, None]).to(gl.float32) * 0.0
        for place in gl.static_range(top_k):
            pair = row * top_k + place
            taken = (gl.load(ids + pair) >= 0)[:, :, None] & (h >= 0)
            at = output + pair[:, :, None] * H + h
            value = gl.load(weights + pair)[:, :, None] * gl.load(at, mask=taken, other=0.0).to(gl.float32)
            given += gl.where(taken, value, 0.0)
        for i in gl.static_range(shared):
            given += gl.load(output + (row + T * (top_k + i))[:, :, None] * H + h).to(gl.float32)
        given = rounded(given)
    return given


@gluon.jit(do_not_specialize=["T"])
def _between(
    streams,
    output,
    post,
    mix,
    fn,
    base,
    norm_weight,
    new,
    normed,
    new_post,
    new_mix,
    partials,
    squares,
    weights,
    ids,
    output_row,
    post_row,
    post_stream,
    mix_row,
    mix_to,
    mix_from,
    T,
    norm_eps,
    eps,
    H: gl.constexpr,
    top_k: gl.constexpr,
    shared: gl.constexpr,
    iters: gl.constexpr,
    R: gl.constexpr,
    C: gl.constexpr,
    W: gl.constexpr,
    terms: gl.constexpr,
    held: gl.constexpr,
    ahead: gl.constexpr,
    late: gl.constexpr,
):
    """A cluster's rows. ``partials`` [T, C, 32] and ``squares`` [T, C] are what its processors tell each other."""
    share: gl.constexpr = H // C
    columns: gl.constexpr = over_processors([1, 1, share * R // (32 * W)], [1, 1, 32], [1, R, W // R], C)
    products: gl.constexpr = warp_sums(C, W)
    logit: gl.constexpr = over_processors([1, 1, C, 1], [1, 1, 1, 32], [1, R, 1, W // R], C)
    of_rows: gl.constexpr = gl.SliceLayout(2, columns)
    logits_of: gl.constexpr = gl.SliceLayout(2, logit)
    # What never changes need not wait for the kernel in front.
    if held:
        factor = factors_to_memory(fn, H, C, W)
    elif ahead:
        factor = factors_in_registers(fn, H, C, W, products)
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, logits_of)))[None, None, :]
    bias = gl.load(base + column, mask=column < 24, other=0.0)
    processor = gl.arange(0, C, layout=gl.SliceLayout(1, of_rows))[:, None]
    row = gl.program_id(0) * R + gl.arange(0, R, layout=gl.SliceLayout(0, of_rows))[None, :] + processor * 0
    there = row < T
    known = gl.minimum(row, T - 1).to(gl.int64)
    h = gl.arange(0, share, layout=gl.SliceLayout(0, gl.SliceLayout(1, columns)))[None, None, :]
    h = processor[:, :, None] * share + h
    weight = gl.load(norm_weight + h).to(gl.float32)
    gdc_wait()
    if not late:
        gdc_launch_dependents()
    x = streams + known[:, :, None] * (4 * H) + h
    x0 = gl.load(x).to(gl.float32)
    x1 = gl.load(x + H).to(gl.float32)
    x2 = gl.load(x + 2 * H).to(gl.float32)
    x3 = gl.load(x + 3 * H).to(gl.float32)
    given = _given(output, weights, ids, known, h, output_row, T, H, top_k, shared)
    mix += known * mix_row
    post += known * post_row
    s0 = _taken(mix, post, mix_from)
    s1 = _taken(mix + mix_to, post + post_stream, mix_from)
    s2 = _taken(mix + 2 * mix_to, post + 2 * post_stream, mix_from)
    s3 = _taken(mix + 3 * mix_to, post + 3 * post_stream, mix_from)
    if not held:
        if not ahead:
            factor = factors_in_registers(fn, H, C, W, products)
        factor = not_before(factor)
    n0 = _new_stream(x0, x1, x2, x3, given, s0)
    n1 = _new_stream(x0, x1, x2, x3, given, s1)
    n2 = _new_stream(x0, x1, x2, x3, given, s2)
    n3 = _new_stream(x0, x1, x2, x3, given, s3)
    written = new + known[:, :, None] * (4 * H) + h
    stored = there[:, :, None] & (h >= 0)
    gl.store(written, n0, mask=stored)
    gl.store(written + H, n1, mask=stored)
    gl.store(written + 2 * H, n2, mask=stored)
    gl.store(written + 3 * H, n3, mask=stored)
    if late:
        gdc_launch_dependents()
    publish_products(n0, n1, n2, n3, factor, partials, T, R, C, W, terms, held, columns, products)
    w0, w1, w2, w3 = n0.to(gl.float32), n1.to(gl.float32), n2.to(gl.float32), n3.to(gl.float32)
    square = gl.sum((w0 * w0 + w1 * w1) + (w2 * w2 + w3 * w3), axis=2)
    gl.store(partials + (known * C + processor) * 32 + 24, square, mask=there)
    cluster_arrive()
    cluster_wait()
    its = gl.convert_layout(known, gl.SliceLayout(2, gl.SliceLayout(3, logit)), assert_trivial=True)
    at = gl.arange(0, C, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, logit))))
    at = partials + (its[:, :, None, None] * C + at[None, None, :, None]) * 32
    number = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, logit))))
    number = number[None, None, None, :]
    sums = gl.sum(gl.load(at + number, mask=number < 25, other=0.0, cache_modifier=".cg"), axis=2)
    inverse = gl.sum(gl.where(column == 24, sums, 0.0), axis=2)
    logits = sums * gl.rsqrt(inverse / (4 * H) + norm_eps)[:, :, None] + bias
    opened = sigmoid(logits)
    total = _share(opened, column, eps, 0, of_rows) * w0
    total += _share(opened, column, eps, 1, of_rows) * w1
    total += _share(opened, column, eps, 2, of_rows) * w2
    total += _share(opened, column, eps, 3, of_rows) * w3
    total = rounded(total)
    gl.store(squares + known * C + processor, gl.sum(total * total, axis=2), mask=there)
    cluster_arrive()
    # Meanwhile one warp of each processor has the mix of one row.
    its = gl.convert_layout(known, gl.SliceLayout(2, logits_of), assert_trivial=True)
    own = gl.program_id(0) * R + processor
    own = gl.convert_layout((row == own) & (own < T), gl.SliceLayout(2, logits_of), assert_trivial=True)
    if warp() == rank() * (W // R):
        of_post = own[:, :, None] & (column >= 4) & (column < 8)
        gl.store(new_post + its[:, :, None] * 4 + (column - 4), opened, mask=of_post)
        iterate(logits, column, new_mix + its * 16, own, eps, iters)
    cluster_wait()
    square = _norm(squares, known, R, C, W, of_rows)
    result = rounded(total * gl.rsqrt(square / H + norm_eps)[:, :, None]) * weight
    gl.store(normed + known[:, :, None] * H + h, narrowed(result), mask=stored)


@gluon.jit
def _share(opened, column, eps, which: gl.constexpr, of_rows: gl.constexpr):
    pre = gl.sum(gl.where(column == which, opened, 0.0), axis=2) + eps
    return gl.convert_layout(pre, of_rows, assert_trivial=True)[:, :, None]


@gluon.jit
def _norm(squares, known, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr, of_rows: gl.constexpr):
    """[C, R]: each row's sum of squares over its cluster."""
    layout: gl.constexpr = over_processors([1, 1, C], [1, 1, 32], [1, R, W // R], C)
    part = gl.arange(0, C, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    its = gl.convert_layout(known, gl.SliceLayout(2, layout), assert_trivial=True)
    sums = gl.sum(gl.load(squares + its[:, :, None] * C + part, cache_modifier=".cg"), axis=2)
    return gl.convert_layout(sums, of_rows, assert_trivial=True)
