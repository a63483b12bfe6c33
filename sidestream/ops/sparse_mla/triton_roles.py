"""Attention for blocks of 64 query rows by warps with roles: gather, score, and weigh values (Gluon, Hopper only).

``triton_attend.attend`` lets every warp do everything, one after the other. Here four warps gather rows into one of
two buffers of 64 rows or four of 32 (and unpack quantised ones on the way), four make scores and weights of a tile, and
eight keep the result in registers and add weighted values to it. Barriers in shared memory pass tiles on, so that tiles
are gathered, scored and added at the same time. Gluon has no interpreter: a GPU alone tests this whole.

Who waits for whom, per tile: gathering for ``empty`` (values of the tile that was in the buffer are added), scores for
``full``, the store of weights for ``taken`` (the last ones were used), values for ``weighed``.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from sidestream.ops.sparse_mla.triton_gather import gather_plain, gather_plain_halves
from sidestream.ops.sparse_mla.triton_gather_quantised import gather_fp8_ds_mla, gather_mxfp8, stages_mxfp8

WARPS = 8

_LN2 = gl.constexpr(0.6931471805599453)
_PLAIN_REGISTERS = gl.constexpr((72, 120))
_MXFP8_REGISTERS = gl.constexpr((96, 96))
_FP8_REGISTERS = gl.constexpr((64, 128))
"""A thread, of the scores' warps and of those that gather, which have tiles of ``fp8_ds_mla`` in registers. 160 are
left to the eight warps with the result, 128 of which are the result; with fewer the result itself spills."""


@gluon.jit
def _begin_scores(memory, full, done, no_score, kinds):
    """The open product of queries and tile ``done``, once that is there."""
    query, query_rope, keys, rope_keys = memory
    rope, buffers = kinds
    buffer = done % buffers
    mbarrier.wait(full.index(buffer), (done // buffers) & 1)
    fence_async_shared()
    open_score = warpgroup_mma(query, keys.index(buffer).permute((1, 0)), no_score, use_acc=False, is_async=True)
    if rope > 0:
        open_score = warpgroup_mma(query_rope, rope_keys.index(buffer).permute((1, 0)), open_score, is_async=True)
    return open_score


@gluon.jit
def _store_weights(score, top, total, done, memory, barriers, causal: gl.constexpr):
    """Hand on the weights of a tile and what earlier sums shrink by; the new maximum and sum."""
    weights, factors = memory
    weighed, taken = barriers
    higher = gl.maximum(top, gl.max(score, axis=1))
    # A row of a chunk may see nothing of the first tiles of a run.
    base = gl.where(higher == float("-inf"), 0.0, higher) if causal else higher
    weight = gl.exp2(score - base[:, None])
    kept = gl.exp2(top - base)
    total = total * kept + gl.sum(weight, axis=1)
    mbarrier.wait(taken, (done & 1) ^ 1)
    weights.store(weight.to(gl.bfloat16))
    factors.store(kept)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(weighed, count=1)
    return higher, total


@gluon.jit
def _score(memory, barriers, span, block, target, kinds):
    """Scores of each tile, softmax as far as it is known, and at last the log-sum-exp and what to divide by."""
    query, query_rope, keys, rope_keys, weights, factors = memory
    asked, full, weighed, taken = barriers
    begin, end = span
    first, known, heads, splits, chunk_start = block
    lse, out_row, scale_log2 = target
    rope, causal, block_n = kinds
    buffers: gl.constexpr = 128 // block_n
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n, 16])
    read, handed, passed = (query, query_rope, keys, rope_keys), (weights, factors), (weighed, taken)
    product_kinds: gl.constexpr = (rope, buffers)
    member = gl.arange(0, 64, layout=gl.SliceLayout(1, scores))
    score_place = gl.arange(0, block_n, layout=gl.SliceLayout(0, scores))
    flat = first + member
    top = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, scores))
    total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, scores))
    no_score = gl.zeros([64, block_n], gl.float32, layout=scores)
    tiles = gl.cdiv(end - begin, block_n)
    mbarrier.wait(asked, 0)
    for start in range(begin, end, block_n):
        done = (start - begin) // block_n
        open_score = _begin_scores(read, full, done, no_score, product_kinds)
        score = warpgroup_mma_wait(0, [open_score]) * scale_log2
        place = start + score_place
        if causal:
            limit = gl.minimum(chunk_start + flat // heads + 1, end)
            score = gl.where(place[None, :] < limit[:, None], score, float("-inf"))
        else:
            score = gl.where((place < end)[None, :], score, float("-inf"))
        top, total = _store_weights(score, top, total, done, handed, passed, causal)
    if causal:
        total = gl.where(top == float("-inf"), 1.0, total)
    mbarrier.wait(taken, (tiles & 1) ^ 1)
    factors.store(1.0 / total)
    gl.thread_barrier()
    mbarrier.arrive(weighed, count=1)
    row = out_row + (flat // heads * splits).to(gl.int64) * heads + flat % heads
    gl.store(lse + row, (top + gl.log2(total)) * _LN2, mask=member < known)


@gluon.jit
def _weigh(memory, barriers, span, block, target, source, kinds):
    """Queries to shared memory; then the result, kept in registers, grows tile by tile."""
    query, query_rope, keys, weights, factors = memory
    asked, empty, weighed, taken = barriers
    begin, end = span
    first, known, heads, splits, _ = block
    out, out_row = target
    q, q_stride_t, q_stride_h = source
    latent, rope, block_n = kinds
    buffers: gl.constexpr = 128 // block_n
    results: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, latent // 4, 16])
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    by_short_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    column = gl.arange(0, latent, layout=gl.SliceLayout(0, by_row))
    member = gl.arange(0, 64, layout=gl.SliceLayout(1, by_row))
    flat = first + member
    place = (flat // heads).to(gl.int64) * q_stride_t + (flat % heads) * q_stride_h
    query.store(gl.load(q + place[:, None] + column[None, :], mask=(member < known)[:, None], other=0.0))
    if rope > 0:
        short = gl.arange(0, 64, layout=gl.SliceLayout(1, by_short_row))
        short_flat = first + short
        short_place = (short_flat // heads).to(gl.int64) * q_stride_t + (short_flat % heads) * q_stride_h
        short_column = latent + gl.arange(0, rope, layout=gl.SliceLayout(0, by_short_row))
        part = gl.load(q + short_place[:, None] + short_column[None, :], mask=(short < known)[:, None], other=0.0)
        query_rope.store(part)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(asked, count=1)
    result = gl.zeros([64, latent], gl.float32, layout=results)
    for start in range(begin, end, block_n):
        done = (start - begin) // block_n
        buffer = done % buffers
        mbarrier.wait(weighed, done & 1)
        kept = factors.load(gl.SliceLayout(1, results))
        result = result * kept[:, None]
        fence_async_shared()
        open_result = warpgroup_mma(weights, keys.index(buffer), result, is_async=True)
        result = warpgroup_mma_wait(0, [open_result])
        gl.thread_barrier()
        mbarrier.arrive(taken, count=1)
        mbarrier.arrive(empty.index(buffer), count=1)
    tiles = gl.cdiv(end - begin, block_n)
    mbarrier.wait(weighed, tiles & 1)
    result = result * factors.load(gl.SliceLayout(1, results))[:, None]
    # Through the buffers of keys: in the products' layout a warp would write parts of eight lines at a time.
    staged: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    if out.dtype.element_ty == gl.float32:
        scratch = keys._reinterpret(gl.float32, [64, latent], staged)
    else:
        scratch = keys._reinterpret(out.dtype.element_ty, [64, latent], staged)
    scratch.store(result.to(out.dtype.element_ty))
    gl.thread_barrier()
    row = out_row + (flat // heads * splits).to(gl.int64) * heads + flat % heads
    lines = out + row[:, None] * latent + column[None, :]
    gl.store(lines, scratch.load(by_row), mask=(member < known)[:, None])


@gluon.jit
def _gather(pool, memory, barriers, span, kinds):
    """Fill the buffers ``keys`` (and ``rope_keys``) in turn with tiles of rows of ``span``, zeros behind its end."""
    tile: gl.constexpr = kinds[4]
    mx: gl.constexpr = kinds[5]
    if mx:
        gather_mxfp8(pool, memory, barriers, span, kinds)
    elif tile > 0:
        gather_fp8_ds_mla(pool, memory, barriers, span, kinds)
    elif kinds[7] == 32:
        gather_plain_halves(pool, memory, barriers, span, kinds)
    else:
        gather_plain(pool, memory, barriers, span, kinds)


@gluon.jit(
    do_not_specialize=["rows_stride", "heads", "head_blocks", "block_size", "splits", "chunk", "chunk_start"],
    do_not_specialize_on_alignment=["rows", "lengths", "lse"],
)
def attend_roles(
    q,
    values,
    scales,
    ropes,
    rows,
    lengths,
    out,
    lse,
    q_stride_t,
    q_stride_h,
    rows_stride,
    scale_log2,
    heads,
    head_blocks,
    block_size,
    splits,
    chunk,
    chunk_start,
    latent: gl.constexpr,
    rope: gl.constexpr,
    row_elems: gl.constexpr,
    rope_elems: gl.constexpr,
    tile: gl.constexpr,
    mx: gl.constexpr,
    single: gl.constexpr,
    paged: gl.constexpr,
    causal: gl.constexpr,
    block_n: gl.constexpr,
    pdl: gl.constexpr,
    early: gl.constexpr,
):
    """One run of rows for 64 query rows: ``triton_attend.attend`` with the same arguments, for eight warps and the
    eight it adds.

    Plain rows must be bf16. ``values`` of quantised pools are int32 words; ``row_elems`` counts bytes then. ``latent``
    is 512, ``rope`` 0 or 64, ``block_n`` 64 or, of plain rows, 32: smaller tiles wait for each other less
    often, and read queries from shared memory twice as often.
    """
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, latent], gl.bfloat16)
    shared_short: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    shared_weights: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, block_n], gl.bfloat16)
    buffers: gl.constexpr = 128 // block_n
    in_line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if pdl and early:
        gdc_launch_dependents()
    program = gl.program_id(0)
    split = gl.program_id(1)
    if causal:
        token = program.to(gl.int64) * 0
        # The longest first: what is left at the end shall be short.
        first = (gl.cdiv(chunk * heads, 64) - 1 - program) * 64
        known = gl.minimum(chunk * heads - first, 64)
        length = chunk_start + (first + known - 1) // heads + 1
    else:
        token = (program // head_blocks).to(gl.int64)
        first = (program % head_blocks) * 64
        known = gl.minimum(heads - first, 64)
        length = gl.load(lengths + token).to(gl.int32)
    run = gl.cdiv(gl.cdiv(length, 64), splits) * 64
    begin = split * run
    end = gl.minimum(begin + run, length)
    out_row = (token * splits + split) * heads
    if begin >= length:
        by_row: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
        member = gl.arange(0, 64, layout=gl.SliceLayout(1, by_row))
        flat = first + member
        row = out_row + (flat // heads * splits).to(gl.int64) * heads + flat % heads
        none = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, by_row))
        gl.store(lse + row, none, mask=member < known)
        if single:
            column = gl.arange(0, latent, layout=gl.SliceLayout(0, by_row))
            nothing = gl.zeros([64, latent], gl.float32, layout=by_row).to(out.dtype.element_ty)
            gl.store(out + row[:, None] * latent + column[None, :], nothing, mask=(member < known)[:, None])
    else:
        query = gl.allocate_shared_memory(gl.bfloat16, [64, latent], shared)
        keys = gl.allocate_shared_memory(gl.bfloat16, [buffers, block_n, latent], shared)
        weights = gl.allocate_shared_memory(gl.bfloat16, [64, block_n], shared_weights)
        factors = gl.allocate_shared_memory(gl.float32, [64], in_line)
        near = gl.allocate_shared_memory(gl.int32, [2, 64], in_line)
        if tile > 0 and not mx:
            by_tile: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
            staged = gl.allocate_shared_memory(gl.float32, [64, latent // tile], by_tile)
        elif mx:
            staged = stages_mxfp8()
        else:
            staged = near
        if rope > 0:
            query_rope = gl.allocate_shared_memory(gl.bfloat16, [64, rope], shared_short)
            rope_keys = gl.allocate_shared_memory(gl.bfloat16, [buffers, block_n, rope], shared_short)
        else:
            query_rope = query
            rope_keys = keys
        asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        weighed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [buffers, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [buffers, 1], mbarrier.MBarrierLayout())
        mbarrier.init(asked, count=1)
        mbarrier.init(weighed, count=1)
        mbarrier.init(taken, count=1)
        # Plain rows and rope keys come by asynchronous copies, for which each of 128 threads arrives.
        copied: gl.constexpr = 128 if tile == 0 else 129 if rope > 0 else 1
        for i in gl.static_range(buffers):
            mbarrier.init(full.index(i), count=copied)
            mbarrier.init(empty.index(i), count=1)
        gl.thread_barrier()
        span = (begin, end)
        block = (first, known, heads, splits, chunk_start)
        weigh_kinds: gl.constexpr = (latent, rope, block_n)
        score_kinds: gl.constexpr = (rope, causal, block_n)
        gather_kinds: gl.constexpr = (latent, rope, row_elems, rope_elems, tile, mx, paged, block_n)
        registers: gl.constexpr = _MXFP8_REGISTERS if mx else _FP8_REGISTERS if tile > 0 else _PLAIN_REGISTERS
        gl.warp_specialize(
            [
                (
                    _weigh,
                    (
                        (query, query_rope, keys, weights, factors),
                        (asked, empty, weighed, taken),
                        span,
                        block,
                        (out, out_row),
                        (q + token * q_stride_t, q_stride_t, q_stride_h),
                        weigh_kinds,
                    ),
                ),
                (
                    _score,
                    (
                        (query, query_rope, keys, rope_keys, weights, factors),
                        (asked, full, weighed, taken),
                        span,
                        block,
                        (lse, out_row, scale_log2),
                        score_kinds,
                    ),
                ),
                (
                    _gather,
                    (
                        (values, scales, ropes, rows + token * rows_stride, block_size),
                        (keys, rope_keys, near, staged),
                        (full, empty),
                        span,
                        gather_kinds,
                    ),
                ),
            ],
            [4, 4],
            [registers[0], registers[1]],
        )
    if pdl and not early:
        gdc_launch_dependents()
