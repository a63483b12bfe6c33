"""How a sublayer's output will be spread, in Triton: its share for each stream, and the mix that Sinkhorn iterates."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def spread(
    partials: tl.tensor,
    base: tl.tensor,
    bias: tl.tensor,
    post: tl.tensor,
    mix: tl.tensor,
    norm_eps: tl.tensor,
    eps: tl.tensor,
    T: tl.tensor,
    width: tl.tensor,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    ITERS: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    """post and mix of some rows. Entries are scalars for one row, a thread's own for many: no step crosses threads."""
    row = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.arange(0, 32)
    share = tl.arange(0, SHARES)
    if ROWS == 1:
        real = row < T
        at = partials + (row * SHARES + share[:, None]) * 32 + column[None, :]
        there = real
        sums = tl.sum(tl.load(at), axis=0)
        inverse = tl.rsqrt(tl.sum(tl.where(column == 24, sums, 0.0), axis=0) / width + norm_eps)
        logits = sums * inverse + bias
        opened = tl.sigmoid(logits)
        tl.store(post + row * 4 + column - 4, opened, mask=(column >= 4) & (column < 8))
    else:
        row = row + tl.arange(0, ROWS)
        real = row < T
        at = partials + row[:, None] * SHARES * 32 + share[None, :] * 32
        there = real[:, None] & (share >= 0)[None, :]
        inverse = tl.rsqrt(tl.sum(tl.load(at + 24, mask=there, other=0.0), axis=1) / width + norm_eps)
        for i in tl.static_range(4):
            logit = tl.sum(tl.load(at + 4 + i, mask=there, other=0.0), axis=1) * inverse + tl.load(base + 4 + i)
            tl.store(post + row * 4 + i, tl.sigmoid(logit), mask=real)
        logits = inverse
    a0, a1, a2, a3 = _row(logits, at, there, inverse, base, 0, eps, ROWS, FAST)
    b0, b1, b2, b3 = _row(logits, at, there, inverse, base, 1, eps, ROWS, FAST)
    c0, c1, c2, c3 = _row(logits, at, there, inverse, base, 2, eps, ROWS, FAST)
    d0, d1, d2, d3 = _row(logits, at, there, inverse, base, 3, eps, ROWS, FAST)
    a0, b0, c0, d0 = _divided(a0, b0, c0, d0, eps, FAST)
    a1, b1, c1, d1 = _divided(a1, b1, c1, d1, eps, FAST)
    a2, b2, c2, d2 = _divided(a2, b2, c2, d2, eps, FAST)
    a3, b3, c3, d3 = _divided(a3, b3, c3, d3, eps, FAST)
    for _ in range(1, ITERS):
        a0, a1, a2, a3 = _divided(a0, a1, a2, a3, eps, FAST)
        b0, b1, b2, b3 = _divided(b0, b1, b2, b3, eps, FAST)
        c0, c1, c2, c3 = _divided(c0, c1, c2, c3, eps, FAST)
        d0, d1, d2, d3 = _divided(d0, d1, d2, d3, eps, FAST)
        a0, b0, c0, d0 = _divided(a0, b0, c0, d0, eps, FAST)
        a1, b1, c1, d1 = _divided(a1, b1, c1, d1, eps, FAST)
        a2, b2, c2, d2 = _divided(a2, b2, c2, d2, eps, FAST)
        a3, b3, c3, d3 = _divided(a3, b3, c3, d3, eps, FAST)
    mix += row * 16
    _store(mix, a0, b0, c0, d0, real)
    _store(mix + 4, a1, b1, c1, d1, real)
    _store(mix + 8, a2, b2, c2, d2, real)
    _store(mix + 12, a3, b3, c3, d3, real)


@triton.jit  # type: ignore[untyped-decorator]
def _row(
    logits: tl.tensor,
    at: tl.tensor,
    there: tl.tensor,
    inverse: tl.tensor,
    base: tl.tensor,
    ROW: tl.constexpr,
    eps: tl.tensor,
    ROWS: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Row ``ROW`` of comb, after its softmax and ``eps``."""
    e0 = _logit(logits, at, there, inverse, base, 8 + 4 * ROW, ROWS)
    e1 = _logit(logits, at, there, inverse, base, 9 + 4 * ROW, ROWS)
    e2 = _logit(logits, at, there, inverse, base, 10 + 4 * ROW, ROWS)
    e3 = _logit(logits, at, there, inverse, base, 11 + 4 * ROW, ROWS)
    largest = tl.maximum(tl.maximum(e0, e1), tl.maximum(e2, e3))
    e0, e1, e2, e3 = tl.exp(e0 - largest), tl.exp(e1 - largest), tl.exp(e2 - largest), tl.exp(e3 - largest)
    e0, e1, e2, e3 = _divided(e0, e1, e2, e3, 0.0, FAST)
    return e0 + eps, e1 + eps, e2 + eps, e3 + eps


@triton.jit  # type: ignore[untyped-decorator]
def _logit(
    logits: tl.tensor,
    at: tl.tensor,
    there: tl.tensor,
    inverse: tl.tensor,
    base: tl.tensor,
    COLUMN: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    if ROWS == 1:
        value = tl.sum(tl.where(tl.arange(0, 32) == COLUMN, logits, 0.0), axis=0)
    else:
        value = tl.sum(tl.load(at + COLUMN, mask=there, other=0.0), axis=1) * inverse + tl.load(base + COLUMN)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def _divided(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, eps: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Four numbers by their sum plus ``eps``. ``FAST``: the reciprocal is one instruction, within one ulp."""
    total = ((a + b) + (c + d)) + eps
    if FAST:
        factor = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        factor = 1.0 / total
    return a * factor, b * factor, c * factor, d * factor


@triton.jit  # type: ignore[untyped-decorator]
def _store(to: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, real: tl.tensor) -> None:
    tl.store(to, a, mask=real)
    tl.store(to + 1, b, mask=real)
    tl.store(to + 2, c, mask=real)
    tl.store(to + 3, d, mask=real)
