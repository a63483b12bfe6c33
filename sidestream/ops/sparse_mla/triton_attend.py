"""Triton kernels of absorbed latent attention: runs of rows for one token and a block of heads, and the merge of runs.

Sparse and dense MLA share them: pool rows are named one by one, or follow from a block table. The running maximum and
sum are those of online softmax (Milakov and Gimelshein 2018), merging runs that of Flash-Decoding (Dao et al. 2023).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _pool_rows(own_rows, position, end, block_size, paged: tl.constexpr):
    """Pool rows int64 of places in a token's list or sequence; 0 from ``end`` on."""
    seen = position < end
    if paged:
        block = tl.load(own_rows + position // block_size, mask=seen, other=0).to(tl.int64)
        return block * block_size + position % block_size
    else:
        return tl.load(own_rows + position, mask=seen, other=0).to(tl.int64)


@triton.jit
def _latents(
    row,
    seen,
    values,
    scales,
    row_elems: tl.constexpr,
    latent: tl.constexpr,
    tile: tl.constexpr,
    mx: tl.constexpr,
    block_n: tl.constexpr,
    dtype: tl.constexpr,
):
    """[block_n, latent] of ``dtype`` in pool rows [block_n] int64; zeros where a row is not ``seen``."""
    column = tl.arange(0, latent)
    raw = tl.load(values + row[:, None] * row_elems + column[None, :], mask=seen[:, None], other=0.0)
    if tile > 0:
        part = tl.arange(0, latent // tile)
        if mx:
            code = tl.load(scales + row[:, None] * row_elems + latent + part[None, :], mask=seen[:, None], other=0)
            bits = code.to(tl.int32)
            scale = tl.where(bits == 255, 0x7FC00000, bits << 23).to(tl.float32, bitcast=True)
        else:
            place = row[:, None] * (row_elems // 4) + latent // 4 + part[None, :]
            scale = tl.load(scales + place, mask=seen[:, None], other=0.0)
        wide = tl.reshape(raw.to(tl.float32), (block_n, latent // tile, tile)) * scale[:, :, None]
        raw = tl.reshape(wide, (block_n, latent))
    return raw.to(dtype)


@triton.jit
def _online_softmax(score, top, total, hollow: tl.constexpr):
    """(new maximum, what earlier sums shrink by, new sums column by column, weights); ``hollow``: a row of the first
    tiles may see nothing."""
    higher = tl.maximum(top, tl.max(score, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher) if hollow else higher
    weight = tl.exp2(score - base[:, None])
    kept = tl.exp2(top - base)
    return higher, kept, total * kept[:, None] + weight, weight


@triton.jit(
    do_not_specialize=["rows_stride", "heads", "head_blocks", "block_size", "splits", "chunk", "chunk_start"],
    do_not_specialize_on_alignment=["rows", "lengths", "lse"],
)
def attend(
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
    latent: tl.constexpr,
    rope: tl.constexpr,
    row_elems: tl.constexpr,
    rope_elems: tl.constexpr,
    tile: tl.constexpr,
    mx: tl.constexpr,
    single: tl.constexpr,
    block_h: tl.constexpr,
    block_n: tl.constexpr,
    stages: tl.constexpr,
    parted: tl.constexpr,
    paged: tl.constexpr,
    causal: tl.constexpr,
    dtype: tl.constexpr,
    pdl: tl.constexpr,
    early: tl.constexpr,
):
    """One run of one token's rows for ``block_h`` heads; grid (tokens * head_blocks, splits).

    With ``causal`` the ``chunk`` tokens continue one sequence of ``chunk_start``, whose blocks ``rows`` names; each
    sees the rows before it and its own. A program has ``block_h`` queries in the order of tokens and heads, those of
    several tokens if heads are few; grid (chunk * heads / block_h, splits). ``lengths`` is not read then.

    Runs are multiples of ``block_n`` rows, cut from the token's own length, so that a token's result depends on no
    other token. A run that would begin behind the length leaves an lse of -inf and nothing else.

    Args:
        values, scales, ropes: one pool seen as its values, its scales (bytes or fp32) and its rope keys (bf16, or what
            a plain pool holds); ``row_elems`` counts elements of ``values`` a row, ``rope_elems`` those of ``ropes``.
        rows: pool rows of each token or, ``paged``, its blocks of ``block_size`` rows.
        lengths: rows of each token.
        out, lse: [T, splits, H, latent] and [T, splits, H], dense.
        scale_log2: of the scores, for exponentials to the base 2.
        single: ``splits`` is 1, so a token without rows gets zeros too.
        parted: the softmax stands in a branch that is always taken. Otherwise the compiler sees two products chained,
            gives each group of four warps all columns of the first one, and computes it twice with eight warps.
        dtype: of the operands of products.
        pdl: let the kernel behind this one start while the last runs end or, ``early``, once all have begun.
    """
    if pdl and early:
        gdc_launch_dependents()
    place = tl.program_id(0)
    split = tl.program_id(1)
    if causal:
        # The longest first: what is left at the end shall be short.
        place = tl.cdiv(chunk * heads, block_h) - 1 - place
        flat = place * block_h + tl.arange(0, block_h)
        known = flat < chunk * heads
        token = (flat // heads).to(tl.int64)
        head = flat % heads
        limit = chunk_start + flat // heads + 1
        length = chunk_start + (tl.minimum((place + 1) * block_h, chunk * heads) - 1) // heads + 1
        own_rows = rows
    else:
        token = (place // head_blocks).to(tl.int64)
        head = (place % head_blocks) * block_h + tl.arange(0, block_h)
        known = head < heads
        length = tl.load(lengths + token).to(tl.int32)
        own_rows = rows + token * rows_stride
    run = tl.cdiv(tl.cdiv(length, block_n), splits) * block_n
    begin = split * run
    end = tl.minimum(begin + run, length)
    out_place = (token * splits + split) * heads + head
    column = tl.arange(0, latent)
    if begin >= length:
        tl.store(lse + out_place, tl.full((block_h,), float("-inf"), tl.float32), mask=known)
        if single:
            nothing = tl.zeros((block_h, latent), dtype=out.dtype.element_ty)
            tl.store(out + out_place[:, None] * latent + column[None, :], nothing, mask=known[:, None])
    else:
        q_row = q + token * q_stride_t + head.to(tl.int64) * q_stride_h
        query = tl.load(q_row[:, None] + column[None, :], mask=known[:, None], other=0.0).to(dtype)
        if rope > 0:
            rope_column = tl.arange(0, rope)
            rope_place = rope_elems - rope + rope_column
            query_rope = tl.load(q_row[:, None] + latent + rope_column[None, :], mask=known[:, None], other=0.0)
            query_rope = query_rope.to(dtype)
        top = tl.full((block_h,), float("-inf"), tl.float32)
        total = tl.zeros((block_h, block_n), dtype=tl.float32)
        result = tl.zeros((block_h, latent), dtype=tl.float32)
        for start in tl.range(begin, end, block_n, num_stages=stages):
            position = start + tl.arange(0, block_n)
            seen = position < end
            row = _pool_rows(own_rows, position, end, block_size, paged)
            key = _latents(row, seen, values, scales, row_elems, latent, tile, mx, block_n, dtype)
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
            if rope > 0:
                pointer = ropes + row[:, None] * rope_elems + rope_place[None, :]
                key_rope = tl.load(pointer, mask=seen[:, None], other=0.0).to(dtype)
                # Scaled before they are added: as plain sum they would become chained products.
                score += tl.dot(query_rope, tl.trans(key_rope), input_precision="ieee") * scale_log2
            if causal:
                score = tl.where(seen[None, :] & (position[None, :] < limit[:, None]), score, float("-inf"))
            else:
                score = tl.where(seen[None, :], score, float("-inf"))
            if parted:
                if start < length:
                    higher, kept, total, weight = _online_softmax(score, top, total, causal)
                    weight = weight.to(dtype)
                else:
                    higher, kept = top, top
                    weight = tl.zeros((block_h, block_n), dtype=dtype)
            else:
                higher, kept, total, weight = _online_softmax(score, top, total, causal)
                weight = weight.to(dtype)
            top = higher
            result = tl.dot(weight, key, acc=result * kept[:, None], input_precision="ieee")
            if parted and tile == 0 and dtype == tl.bfloat16:
                # A use in this step, so that the product ends in it. One that is still open when the first product of
                # the next step starts makes ptxas run that one's instructions one by one (its warning C7515).
                result = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [result], tl.float32, True, 1)
        summed = tl.sum(total, axis=1)
        if causal:
            summed = tl.where(top == float("-inf"), 1.0, summed)
        result = result * (1.0 / summed)[:, None]
        tl.store(lse + out_place, (top + tl.log2(summed)) * _LN2, mask=known)
        tl.store(
            out + out_place[:, None] * latent + column[None, :], result.to(out.dtype.element_ty), mask=known[:, None]
        )
    if pdl and not early:
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["heads", "splits"], do_not_specialize_on_alignment=["lse"])
def merge(
    parts,
    part_lse,
    out,
    lse,
    heads,
    splits,
    latent: tl.constexpr,
    block_s: tl.constexpr,
    block_r: tl.constexpr,
    sparing: tl.constexpr,
    pdl: tl.constexpr,
):
    """Merge the runs of one token and head, ``block_r`` elements of the latent; grid (tokens * H, latent / block_r).

    Args:
        parts, part_lse: [T, splits, H, latent] and [T, splits, H] fp32; parts with an lse of -inf are never used, and
            not read if ``sparing``.
        out, lse: [T, H, latent] and [T, H]; 0 and -inf without any run.
        block_s: ``splits`` rounded up to a power of two.
    """
    if pdl:
        gdc_wait()
    place = tl.program_id(0)
    token = (place // heads).to(tl.int64)
    head = place % heads
    split = tl.arange(0, block_s)
    column = tl.program_id(1) * block_r + tl.arange(0, block_r)
    source = (token * splits + split) * heads + head
    one = tl.load(part_lse + source, mask=split < splits, other=float("-inf"))
    held = one != float("-inf")
    pointer = parts + source[:, None] * latent + column[None, :]
    if sparing:
        part = tl.load(pointer, mask=held[:, None], other=0.0).to(tl.float32)
    else:
        # Not behind the log-sum-exps, since one load's latency is a part of what a merge of few runs takes.
        part = tl.load(pointer, mask=(split < splits)[:, None], other=0.0).to(tl.float32)
        part = tl.where(held[:, None], part, 0.0)
    top = tl.max(one, axis=0)
    empty = top == float("-inf")
    top = tl.where(empty, 0.0, top)
    weight = tl.exp(one - top)
    total = tl.where(empty, 1.0, tl.sum(weight, axis=0))
    result = tl.sum(part * weight[:, None], axis=0) / total
    target = token * heads + head
    tl.store(out + target * latent + column, result.to(out.dtype.element_ty))
    if tl.program_id(1) == 0:
        tl.store(lse + target, tl.where(empty, float("-inf"), top + tl.log(total)))
