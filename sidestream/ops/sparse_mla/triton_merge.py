"""Merge of runs, each thread with all runs of its own columns (Triton).

``triton_attend.merge`` spreads the runs of one head over the warps of a program, which then meet at four barriers: a
program for each head, of which there are thousands. Here nothing is exchanged between threads, all parts of a group of
runs are on their way at once, and a program has several heads.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit(do_not_specialize=["tokens", "heads", "splits"], do_not_specialize_on_alignment=["part_lse", "lse"])
def merge_in_threads(
    parts,
    part_lse,
    out,
    lse,
    tokens,
    heads,
    splits,
    latent: tl.constexpr,
    group: tl.constexpr,
    block_h: tl.constexpr,
    block_r: tl.constexpr,
    sparing: tl.constexpr,
    pdl: tl.constexpr,
):
    """Merge the runs of ``block_h`` rows of tokens and heads, ``block_r`` elements of the latent each; grid
    (tokens * H / block_h, latent / block_r).

    Args:
        parts, part_lse: [T, splits, H, latent] and [T, splits, H] fp32; parts with an lse of -inf are never used, and
            not read if ``sparing``.
        out, lse: [T, H, latent] and [T, H]; 0 and -inf without any run.
        group: runs that are read at once; more go round a loop.
    """
    if pdl:
        gdc_wait()
    place = tl.program_id(0) * block_h + tl.arange(0, block_h)
    known = place < tokens * heads
    token = (place // heads).to(tl.int64)
    first = token * splits * heads + place % heads
    column = tl.program_id(1) * block_r + tl.arange(0, block_r)
    top = tl.full((block_h,), float("-inf"), tl.float32)
    total = tl.zeros((block_h,), tl.float32)
    result = tl.zeros((block_h, block_r), tl.float32)
    for start in range(0, splits, group):
        ones = ()
        for i in tl.static_range(group):
            there = known & (start + i < splits)
            one = tl.load(part_lse + first + (start + i) * heads, mask=there, other=float("-inf"))
            ones = ones + (one,)  # noqa: RUF005  the compiler knows no (*ones, one)
        held = ()
        for i in tl.static_range(group):
            # Unless sparing not behind the log-sum-exps, since one load's latency is most of what a merge takes.
            there = ones[i] != float("-inf") if sparing else known & (start + i < splits)
            pointer = parts + (first + (start + i) * heads)[:, None] * latent + column[None, :]
            held = held + (tl.load(pointer, mask=there[:, None], other=0.0),)  # noqa: RUF005
        higher = top
        for i in tl.static_range(group):
            higher = tl.maximum(higher, ones[i])
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp(top - base)
        total = total * kept
        result = result * kept[:, None]
        for i in tl.static_range(group):
            weight = tl.exp(ones[i] - base)
            total += weight
            part = tl.where((ones[i] != float("-inf"))[:, None], held[i].to(tl.float32), 0.0)
            result += part * weight[:, None]
        top = higher
    empty = top == float("-inf")
    total = tl.where(empty, 1.0, total)
    result = result * (1.0 / total)[:, None]
    target = place.to(tl.int64)
    tl.store(out + target[:, None] * latent + column[None, :], result.to(out.dtype.element_ty), mask=known[:, None])
    if tl.program_id(1) == 0:
        tl.store(lse + target, tl.where(empty, float("-inf"), top + tl.log(total)), mask=known)
