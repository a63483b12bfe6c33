"""Everything within a chunk of Kimi Delta Attention by blocks of 16 tokens, for forget gates with a gentle lower bound.

The notation is that of ``triton_chunked``, which launches this in place of its own first kernel. A block's decays are
taken from its eighth token: rows of the block at most ``RANGE`` from there, columns up to the block's end no further
above, so that ``exp(S_i - S_j)`` splits into two factors of fp32 and bf16 without loss. One product of the chunk's
columns with its rows is right in that block's rows, so that four give both triangles, where halves take twelve.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sidestream.ops.kda.torch_impl import ForgetGate
from sidestream.ops.kda.triton_conv import sigmoid

BLOCK = 16
"""Tokens."""
RANGE = 40.0
"""What half a block may forget, in powers of e: products of two factors and sums of 128 of them are finite in fp32, and
what is 1e-17 of the largest still has all its digits."""
LEAST_CHANNELS = 64
"""Of a bf16 head, K and V: with fewer, ptxas 12.8 makes matrix descriptors of the last products but one from the wrong
register, and they read beyond the program's shared memory (an illegal memory access)."""
WARPS, REGISTERS, PIECE = 4, 255, 32
"""Of the kernel: the most registers of a thread, and channels at once."""
_LOG2_E = tl.constexpr(1.4426950408889634)


def gentle(gate: ForgetGate) -> bool:
    """Whether no block can forget more than its factors hold."""
    return gate.lower_bound is not None and -RANGE <= gate.lower_bound * (BLOCK // 2) <= 0.0


@triton.jit  # type: ignore[untyped-decorator]
def product(a: tl.tensor, b: tl.tensor, NARROW: tl.constexpr, sums: tl.tensor | None = None) -> tl.tensor:
    """In bf16 (whatever the narrow dtype of the model: decays need its range), or fp32."""
    if NARROW:
        result = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), sums)
    else:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    return result


@triton.jit(do_not_specialize=["head", "group"])  # type: ignore[untyped-decorator]
def within_blocks(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    forget: tl.tensor,
    beta: tl.tensor,
    dt_bias: tl.tensor,
    a_log: tl.tensor,
    chunks: tl.tensor,
    made: tl.tensor,
    marks: tl.tensor,
    reach: tl.tensor,
    until: tl.tensor,
    scores: tl.tensor,
    total: tl.tensor,
    lower_bound: tl.tensor,
    beta_row: tl.tensor,
    head: tl.tensor,
    H: tl.tensor,
    group: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    """One chunk of one head, ``PIECE`` channels at a time, the next ones on their way. Of the sums of log decays (base
    2) memory takes one row a block, ``marks``, rounded: all that counts is that every factor is taken from the same.
    ``made`` holds decayed keys until the inverse is there."""
    n = tl.program_id(1).to(tl.int64)  # heads of a token stand together, so they run together
    h = head + tl.program_id(0)
    tile = n * group + tl.program_id(0)
    i = tl.arange(0, C)
    token = tl.load(chunks + 3 * n) + i
    real = i < tl.load(chunks + 3 * n + 1)
    shown = real[:, None]
    row = (token * H + h)[:, None]
    gain = tl.load(beta + token * beta_row + h, mask=real, other=0.0).to(tl.float32)
    gain = tl.where(real, tl.sigmoid(gain), 0.0)
    rate = tl.exp(tl.load(a_log + h).to(tl.float32))
    blocks: tl.constexpr = C // BLOCK
    b = tl.arange(0, blocks)
    block = i // BLOCK
    seen = b[None, :, None] <= b[:, None, None]
    middle = (i % BLOCK == BLOCK // 2 - 1)[:, None]
    marks += tile * (blocks * K)
    flat = tile * (C * K) + i[:, None] * K
    made += tile * (C * (K + V))

    score = tl.zeros((blocks, BLOCK, C), dtype=tl.float32)
    lower = tl.zeros((blocks, BLOCK, C), dtype=tl.float32)
    piece = row * K + tl.arange(0, PIECE)[None, :]
    later_raw = tl.load(forget + piece, mask=shown, other=0.0)
    later_key = tl.load(k + piece, mask=shown, other=0.0)
    later_query = tl.load(q + piece, mask=shown, other=0.0)
    later_bias = tl.load(dt_bias + h * K + tl.arange(0, PIECE)).to(tl.float32)
    for first in tl.range(0, K, PIECE, num_stages=1):
        some = first + tl.arange(0, PIECE)[None, :]
        raw = later_raw.to(tl.float32) + later_bias[None, :]
        key, query = later_key.to(tl.float32), later_query.to(tl.float32)
        piece += PIECE
        more = shown & (first + PIECE < K)
        later_raw = tl.load(forget + piece, mask=more, other=0.0)
        later_key = tl.load(k + piece, mask=more, other=0.0)
        later_query = tl.load(q + piece, mask=more, other=0.0)
        bias = h * K + first + PIECE + tl.arange(0, PIECE)
        later_bias = tl.load(dt_bias + bias, mask=first + PIECE < K, other=0.0).to(tl.float32)
        decay = tl.where(shown, lower_bound * _LOG2_E * sigmoid(rate * raw), 0.0)
        since = tl.cumsum(decay, axis=0)
        last = tl.sum(decay, axis=0)[None, :]
        tl.store(marks + block[:, None] * K + some, since.to(marks.dtype.element_ty), mask=middle)
        opened = tl.exp2(since)
        tl.store(reach + flat + some, (query * opened).to(reach.dtype.element_ty))
        tl.store(until + flat + some, (key * tl.exp2(last - since)).to(until.dtype.element_ty))
        tl.store(total + tile * K + some, tl.exp2(last))
        tl.store(made + i[:, None] * K + some, (key * opened * gain[:, None]).to(made.dtype.element_ty))
        tl.debug_barrier()  # other threads' marks are read below
        gap = since - tl.load(marks + block[:, None] * K + some).to(tl.float32)
        mark = tl.load(marks + b[:, None] * K + some).to(tl.float32)
        between = tl.exp2(tl.where(seen, mark[:, None, :] - mark[None, :, :], float("-inf")))
        columns = tl.reshape(key * tl.exp2(-gap), (1, blocks, BLOCK, PIECE)) * between[:, :, None, :]
        columns = tl.permute(tl.reshape(columns, (blocks, C, PIECE)), (0, 2, 1))
        factor = tl.exp2(gap)
        score = product(tl.reshape(query * factor, (blocks, BLOCK, PIECE)), columns, NARROW, score)
        lower = product(tl.reshape(key * factor, (blocks, BLOCK, PIECE)), columns, NARROW, lower)

    tl.debug_barrier()  # a product's threads read what others have stored; early, since memory takes its time
    channel = tl.arange(0, K)[None, :]
    column = tl.arange(0, V)[None, :]
    keyed = tl.load(made + i[:, None] * K + channel)
    value = tl.load(v + row * V + column, mask=shown, other=0.0)
    score = tl.reshape(score, (C, C))
    lower = tl.reshape(lower, (C, C))
    score = tl.where(i[:, None] >= i[None, :], score, 0.0)
    tl.store(scores + tile * (C * C) + i[:, None] * C + i[None, :], score.to(scores.dtype.element_ty))
    lower = tl.where(i[:, None] > i[None, :], lower * gain[:, None], 0.0)
    pair = (i // 2)[:, None] == (i // 2)[None, :]
    inverse = tl.where(i[:, None] == i[None, :], 1.0, tl.where(pair, -lower, 0.0))
    for level in tl.static_range(1, LEVELS):
        whole = (i >> (level + 1))[:, None] == (i >> (level + 1))[None, :]
        half = (i >> level)[:, None] == (i >> level)[None, :]
        below = tl.where(whole & (half == 0), lower, 0.0)
        inverse -= product(product(inverse, below, NARROW), inverse, NARROW)
    added = product(inverse, value.to(tl.float32) * gain[:, None], NARROW)
    tl.store(made + C * K + i[:, None] * V + column, added.to(made.dtype.element_ty))
    turned = product(inverse, keyed, NARROW)
    tl.store(made + i[:, None] * K + channel, turned.to(made.dtype.element_ty))
