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
    FACTORS: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    """post and mix of some rows. Entries are scalars for one row, a thread's own for many: no step crosses threads.

    With ``FACTORS`` the matrix stays as it is, and what its rows and columns are divided by is iterated instead: a row
    of entries / column[j], times 1 / row[i], over its sum plus eps, is that row over (its sum + eps * row[i]), whatever
    row[i] was. Such a sum takes two reciprocals, of products of two divisors each, and one addition behind them; four
    of these numbers go into the next. The matrix itself takes four reciprocals, a product, and three additions.
    """
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
    if FACTORS:
        r0 = a0 * 0.0 + 1.0
        r1, r2, r3 = r0, r0, r0
        w0, w1 = ((a0 + b0) + (c0 + d0)) + eps, ((a1 + b1) + (c1 + d1)) + eps
        w2, w3 = ((a2 + b2) + (c2 + d2)) + eps, ((a3 + b3) + (c3 + d3)) + eps
        for _ in range(1, ITERS):
            p, q = _reciprocal(w0 * w1, FAST), _reciprocal(w2 * w3, FAST)
            r0 = _over(a0, a1, a2, a3, w0, w1, w2, w3, p, q, eps * r0)
            r1 = _over(b0, b1, b2, b3, w0, w1, w2, w3, p, q, eps * r1)
            r2 = _over(c0, c1, c2, c3, w0, w1, w2, w3, p, q, eps * r2)
            r3 = _over(d0, d1, d2, d3, w0, w1, w2, w3, p, q, eps * r3)
            p, q = _reciprocal(r0 * r1, FAST), _reciprocal(r2 * r3, FAST)
            w0 = _over(a0, b0, c0, d0, r0, r1, r2, r3, p, q, eps * w0)
            w1 = _over(a1, b1, c1, d1, r0, r1, r2, r3, p, q, eps * w1)
            w2 = _over(a2, b2, c2, d2, r0, r1, r2, r3, p, q, eps * w2)
            w3 = _over(a3, b3, c3, d3, r0, r1, r2, r3, p, q, eps * w3)
        u0, u1, u2, u3 = (
            _reciprocal(r0, FAST), _reciprocal(r1, FAST), _reciprocal(r2, FAST), _reciprocal(r3, FAST)
        )  # fmt: skip
        v = _reciprocal(w0, FAST)
        a0, b0, c0, d0 = a0 * u0 * v, b0 * u1 * v, c0 * u2 * v, d0 * u3 * v
        v = _reciprocal(w1, FAST)
        a1, b1, c1, d1 = a1 * u0 * v, b1 * u1 * v, c1 * u2 * v, d1 * u3 * v
        v = _reciprocal(w2, FAST)
        a2, b2, c2, d2 = a2 * u0 * v, b2 * u1 * v, c2 * u2 * v, d2 * u3 * v
        v = _reciprocal(w3, FAST)
        a3, b3, c3, d3 = a3 * u0 * v, b3 * u1 * v, c3 * u2 * v, d3 * u3 * v
    else:
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
def _over(
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    d: tl.tensor,
    w0: tl.tensor,
    w1: tl.tensor,
    w2: tl.tensor,
    w3: tl.tensor,
    p: tl.tensor,
    q: tl.tensor,
    rest: tl.tensor,
) -> tl.tensor:
    """a / w0 + b / w1 + c / w2 + d / w3 + rest; ``p`` is 1 / (w0 * w1), ``q`` is 1 / (w2 * w3)."""
    return (c * w3 + d * w2) * q + ((a * w1 + b * w0) * p + rest)


@triton.jit  # type: ignore[untyped-decorator]
def _reciprocal(value: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """``FAST``: one instruction, within one ulp."""
    if FAST:
        factor = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        factor = 1.0 / value
    return factor


@triton.jit  # type: ignore[untyped-decorator]
def _divided(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, eps: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Four numbers by their sum plus ``eps``."""
    factor = _reciprocal(((a + b) + (c + d)) + eps, FAST)
    return a * factor, b * factor, c * factor, d * factor


@triton.jit  # type: ignore[untyped-decorator]
def _store(to: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, real: tl.tensor) -> None:
    tl.store(to, a, mask=real)
    tl.store(to + 1, b, mask=real)
    tl.store(to + 2, c, mask=real)
    tl.store(to + 3, d, mask=real)
