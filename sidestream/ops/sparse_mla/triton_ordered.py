"""Attention for blocks of 64 heads with gathers and products ordered by hand (Gluon, Hopper only).

``triton_attend.attend`` leaves the order to Triton's pipeliner, which starts the gather of the next rows only after the
second product of these, so tiles must be small and many. Here it starts beside the first product, into the buffer that
the last second product has left: tiles of 64 rows suffice, and queries are read from shared memory half as often.
Quantised rows are unpacked in registers while the second product runs. Gluon has no interpreter: only a GPU tests this.

No product stays open when the next one starts: ptxas would run that one's instructions one by one (C7514, C7515).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

WARPS = 8

_LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _pool_rows(own_rows, position, end, block_size, paged: gl.constexpr):
    """Pool rows int32 of places, 0 from ``end`` on: a pool has fewer than 2**31 rows, and registers are scarce."""
    seen = position < end
    if paged:
        block = gl.load(own_rows + position // block_size, mask=seen, other=0).to(gl.int32)
        row = block * block_size + position % block_size
    else:
        row = gl.load(own_rows + position, mask=seen, other=0).to(gl.int32)
    return row


@gluon.jit
def _copy_rows(target, pool, row, seen, column, elems: gl.constexpr):
    """Start copying columns of pool rows to shared memory; rows not ``seen`` become zeros without being read."""
    source = pool + row.to(gl.int64)[:, None] * elems + column[None, :]
    async_copy.async_copy_global_to_shared(target, source, mask=seen[:, None])


@gluon.jit
def _unpack(raw, scales, count: gl.constexpr, tile: gl.constexpr, mx: gl.constexpr):
    """bf16 [64, count * tile] of E4M3 values and their scales (bytes or fp32) in shared memory."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    cubic: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // tile, tile // 8], [8, 1, 1], [2, 1, 0])
    value = raw.load(flat).to(gl.float32)
    scale = scales.load(gl.SliceLayout(2, cubic))
    if mx:
        bits = scale.to(gl.int32)
        scale = gl.where(bits == 255, 0x7FC00000, bits << 23).to(gl.float32, bitcast=True)
    value = gl.convert_layout(gl.reshape(value, [64, count, tile]), cubic, assert_trivial=True)
    wide = (value * scale[:, :, None]).to(gl.bfloat16)
    return gl.convert_layout(gl.reshape(wide, [64, count * tile]), flat, assert_trivial=True)


@gluon.jit
def _online_softmax(score, place, end, top, total):
    """(weights, new maximum, what earlier sums shrink by, new sums column by column) of scaled scores."""
    score = gl.where((place < end)[None, :], score, float("-inf"))
    higher = gl.maximum(top, gl.max(score, axis=1))
    weight = gl.exp2(score - higher[:, None])
    kept = gl.exp2(top - higher)
    return weight, higher, kept, total * kept[:, None] + weight


@gluon.jit(do_not_specialize=["rows_stride", "heads", "head_blocks", "block_size", "splits"])
def attend_ordered(
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
    latent: gl.constexpr,
    rope: gl.constexpr,
    row_elems: gl.constexpr,
    rope_elems: gl.constexpr,
    tile: gl.constexpr,
    mx: gl.constexpr,
    single: gl.constexpr,
    paged: gl.constexpr,
    pdl: gl.constexpr,
):
    """One run of one token's rows for 64 heads: ``triton_attend.attend`` with the same arguments, for eight warps.

    Plain rows must be bf16, and with rope if ``paged``. ``latent`` is 512, ``rope`` 0 or 64.
    """
    quantised: gl.constexpr = tile > 0
    wide_vec: gl.constexpr = 16 if quantised else 8
    by_row: gl.constexpr = gl.BlockedLayout([1, wide_vec], [1, 32], [8, 1], [1, 0])
    by_q_row: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    by_short_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    results: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, latent // 2, 16])
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, latent], gl.bfloat16)
    shared_short: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    linear: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    program = gl.program_id(0)
    split = gl.program_id(1)
    token = (program // head_blocks).to(gl.int64)
    first_head = (program % head_blocks) * 64
    length = gl.load(lengths + token).to(gl.int32)
    run = gl.cdiv(gl.cdiv(length, 64), splits) * 64
    begin = split * run
    end = gl.minimum(begin + run, length)
    out_base = (token * splits + split) * heads
    score_head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, scores))
    out_head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, results))
    out_column = gl.arange(0, latent, layout=gl.SliceLayout(0, results))
    target = out + (out_base + out_head)[:, None] * latent + out_column[None, :]
    if begin >= length:
        none = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, scores))
        gl.store(lse + out_base + score_head, none, mask=score_head < heads)
        if single:
            nothing = gl.zeros([64, latent], gl.float32, layout=results)
            gl.store(target, nothing.to(out.dtype.element_ty), mask=(out_head < heads)[:, None])
    else:
        own_rows = rows + token * rows_stride
        place = gl.arange(0, 64, layout=gl.SliceLayout(1, by_row))
        column = gl.arange(0, latent, layout=gl.SliceLayout(0, by_row))
        if quantised:
            count: gl.constexpr = latent // tile
            vec: gl.constexpr = count if mx else min(count, 4)
            by_scale: gl.constexpr = gl.BlockedLayout([1, vec], [32, 1], [8, 1], [1, 0])
            scale_place = gl.arange(0, 64, layout=gl.SliceLayout(1, by_scale))
            scale_elems: gl.constexpr = row_elems if mx else row_elems // 4
            scale_first: gl.constexpr = latent if mx else latent // 4
            scale_column = scale_first + gl.arange(0, count, layout=gl.SliceLayout(0, by_scale))
            raw = gl.allocate_shared_memory(values.dtype.element_ty, [64, latent], linear)
            raw_scales = gl.allocate_shared_memory(scales.dtype.element_ty, [64, count], linear)
            key = gl.allocate_shared_memory(gl.bfloat16, [64, latent], shared)
            first = _pool_rows(own_rows, begin + place, end, block_size, paged)
            _copy_rows(raw, values, first, begin + place < end, column, row_elems)
            first = _pool_rows(own_rows, begin + scale_place, end, block_size, paged)
            _copy_rows(raw_scales, scales, first, begin + scale_place < end, scale_column, scale_elems)
        else:
            keys = gl.allocate_shared_memory(gl.bfloat16, [2, 64, latent], shared)
            first = _pool_rows(own_rows, begin + place, end, block_size, paged)
            _copy_rows(keys.index(0), values, first, begin + place < end, column, row_elems)
            # Row numbers come a tile ahead: memory bounds plain rows, and copies shall not wait for them.
            row = _pool_rows(own_rows, begin + 64 + place, end, block_size, paged)
        if rope > 0:
            short_place = gl.arange(0, 64, layout=gl.SliceLayout(1, by_short_row))
            short_column = gl.arange(0, rope, layout=gl.SliceLayout(0, by_short_row))
            rope_column = rope_elems - rope + short_column
            rope_keys = gl.allocate_shared_memory(gl.bfloat16, [2, 64, rope], shared_short)
            first = _pool_rows(own_rows, begin + short_place, end, block_size, paged)
            _copy_rows(rope_keys.index(0), ropes, first, begin + short_place < end, rope_column, rope_elems)
        async_copy.commit_group()

        head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, by_q_row))
        q_row = q + token * q_stride_t + head.to(gl.int64) * q_stride_h
        q_column = gl.arange(0, latent, layout=gl.SliceLayout(0, by_q_row))
        query = gl.load(q_row[:, None] + q_column[None, :], mask=(head < heads)[:, None], other=0.0)
        query_shared = gl.allocate_shared_memory(gl.bfloat16, [64, latent], shared, query)
        if rope > 0:
            short_head = first_head + short_place
            q_short = q + token * q_stride_t + short_head.to(gl.int64) * q_stride_h + latent
            query_rope = gl.load(
                q_short[:, None] + short_column[None, :], mask=(short_head < heads)[:, None], other=0.0
            )
            query_rope_shared = gl.allocate_shared_memory(gl.bfloat16, [64, rope], shared_short, query_rope)
        weight_shared = gl.allocate_shared_memory(gl.bfloat16, [64, 64], shared_short)
        top = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, scores))
        total = gl.zeros([64, 64], gl.float32, layout=scores)
        no_score = gl.zeros([64, 64], gl.float32, layout=scores)
        score_place = gl.arange(0, 64, layout=gl.SliceLayout(0, scores))
        result = gl.zeros([64, latent], gl.float32, layout=results)
        buffer = 0
        async_copy.wait_group(0)
        if quantised:
            gl.thread_barrier()
            key.store(_unpack(raw, raw_scales, count, tile, mx))
        fence_async_shared()
        gl.thread_barrier()
        for start in range(begin, end, 64):
            after = start + 64
            if not quantised:
                key = keys.index(buffer)
            score_open = warpgroup_mma(query_shared, key.permute((1, 0)), no_score, use_acc=False, is_async=True)
            if rope > 0:
                rope_key = rope_keys.index(buffer).permute((1, 0))
                score_open = warpgroup_mma(query_rope_shared, rope_key, score_open, is_async=True)
            buffer = 1 - buffer
            if quantised:
                row = _pool_rows(own_rows, after + place, end, block_size, paged)
                scale_row = _pool_rows(own_rows, after + scale_place, end, block_size, paged)
                _copy_rows(raw, values, row, after + place < end, column, row_elems)
                _copy_rows(raw_scales, scales, scale_row, after + scale_place < end, scale_column, scale_elems)
            else:
                _copy_rows(keys.index(buffer), values, row, after + place < end, column, row_elems)
                row = _pool_rows(own_rows, after + 64 + place, end, block_size, paged)
            if rope > 0:
                short_row = _pool_rows(own_rows, after + short_place, end, block_size, paged)
                short_seen = after + short_place < end
                _copy_rows(rope_keys.index(buffer), ropes, short_row, short_seen, rope_column, rope_elems)
            async_copy.commit_group()
            score = warpgroup_mma_wait(0, [score_open]) * scale_log2
            weight, top, kept, total = _online_softmax(score, start + score_place, end, top, total)
            weight_shared.store(weight.to(gl.bfloat16))
            result = result * gl.convert_layout(kept, gl.SliceLayout(1, results))[:, None]
            fence_async_shared()
            gl.thread_barrier()
            open_result = warpgroup_mma(weight_shared, key, result, is_async=True)
            async_copy.wait_group(0)
            if quantised:
                # All of the next tile is there. It is unpacked beside the product, and stored when that has ended in
                # every warp.
                gl.thread_barrier()
                unpacked = _unpack(raw, raw_scales, count, tile, mx)
                result = warpgroup_mma_wait(0, [open_result])
                gl.thread_barrier()
                key.store(unpacked)
                fence_async_shared()
            else:
                fence_async_shared()
                result = warpgroup_mma_wait(0, [open_result])
            # The next tile is there for every warp, and every warp has left this one.
            gl.thread_barrier()
        summed = gl.sum(total, axis=1)
        result = result * gl.convert_layout(1.0 / summed, gl.SliceLayout(1, results))[:, None]
        gl.store(lse + out_base + score_head, (top + gl.log2(summed)) * _LN2, mask=score_head < heads)
        # Through shared memory: in the products' layout a warp would write parts of eight lines at a time.
        staged: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
        scratch = gl.allocate_shared_memory(out.dtype.element_ty, [64, latent], staged, result.to(out.dtype.element_ty))
        gl.thread_barrier()
        whole = scratch.load(by_q_row)
        lines = out + (out_base + head)[:, None] * latent + q_column[None, :]
        gl.store(lines, whole, mask=(head < heads)[:, None])
    if pdl:
        gdc_launch_dependents()
