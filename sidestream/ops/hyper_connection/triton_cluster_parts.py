"""Parts of ``triton_cluster``: layouts across processors, a cluster's barrier, rounding, and Sinkhorn within a warp."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def over_processors(own, lanes, warps, C):
    """A layout of tensors [C, ...]: ``own`` elements of a thread side by side, the last dimension first."""
    over = [[1 << i] + [0] * (len(own) - 1) for i in range(C.bit_length() - 1)]
    return gl.BlockedLayout(own, lanes, warps, list(range(len(own)))[::-1], over)


@gluon.constexpr_function
def warp_sums(C, W):
    """[C * W, 16, 8] sums, of which each warp has its own."""
    return gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8], [[1 << i, 0, 0] for i in range(C.bit_length() - 1)])


@gluon.constexpr_function
def in_memory(C, together, phases, order):
    """Shared memory of [C * W, ...], each processor's own: lines are turned by so many elements, and so often."""
    over = [[1 << i, 0, 0] for i in range(C.bit_length() - 1)]
    return gl.SwizzledSharedLayout(together, 1, phases, order, over)


@gluon.jit
def cluster_arrive():
    """Whatever this thread has written is there for all threads of the cluster that are behind ``cluster_wait``."""
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned; // dummy $0", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def cluster_wait():
    gl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire.aligned; // dummy $0", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def warp():
    """Which warp of its processor this is: not one number for all threads, so nothing behind it may meet others."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x; shr.u32 $0, $0, 5;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def rank():
    """Of this processor in its cluster."""
    return gl.inline_asm_elementwise("mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def rounded(value):
    """fp32 as bf16 has it, in fp32."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, 0f00000000, $1; shl.b32 $0, t, 16; }",
        "=f,f",
        [value],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def narrowed(value):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [value], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def upper_bits(value):
    """fp32 cut off to the 11 bits that a product in TF32 takes."""
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, 0xffffe000;", "=r,r", [value], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(value):
    """Within one ulp."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def not_before(value):
    """``value``, used only behind what stands above."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def _over(a, b, c, d, w0, w1, w2, w3, p, q, rest):
    """a / w0 + b / w1 + c / w2 + d / w3 + rest; ``p`` is 1 / (w0 * w1), ``q`` is 1 / (w2 * w3)."""
    return (c * w3 + d * w2) * q + ((a * w1 + b * w0) * p + rest)


@gluon.jit
def _entries(logits, column, eps, first: gl.constexpr):
    """Four entries of comb, a row of it, after its softmax and ``eps``."""
    e0 = gl.sum(gl.where(column == first, logits, 0.0), axis=2)
    e1 = gl.sum(gl.where(column == first + 1, logits, 0.0), axis=2)
    e2 = gl.sum(gl.where(column == first + 2, logits, 0.0), axis=2)
    e3 = gl.sum(gl.where(column == first + 3, logits, 0.0), axis=2)
    largest = gl.maximum(gl.maximum(e0, e1), gl.maximum(e2, e3))
    e0, e1, e2, e3 = gl.exp(e0 - largest), gl.exp(e1 - largest), gl.exp(e2 - largest), gl.exp(e3 - largest)
    share = reciprocal((e0 + e1) + (e2 + e3))
    return e0 * share + eps, e1 * share + eps, e2 * share + eps, e3 * share + eps


@gluon.jit
def iterate(logits, column, mix, real, eps, iters: gl.constexpr):
    """The mix of each row by Sinkhorn's factors, as in ``triton_sinkhorn``. No step crosses warps."""
    a0, a1, a2, a3 = _entries(logits, column, eps, 8)
    b0, b1, b2, b3 = _entries(logits, column, eps, 12)
    c0, c1, c2, c3 = _entries(logits, column, eps, 16)
    d0, d1, d2, d3 = _entries(logits, column, eps, 20)
    r0 = a0 * 0.0 + 1.0
    r1, r2, r3 = r0 + 0.0, r0 + 0.0, r0 + 0.0
    w0, w1 = ((a0 + b0) + (c0 + d0)) + eps, ((a1 + b1) + (c1 + d1)) + eps
    w2, w3 = ((a2 + b2) + (c2 + d2)) + eps, ((a3 + b3) + (c3 + d3)) + eps
    for _ in range(1, iters):
        p, q = reciprocal(w0 * w1), reciprocal(w2 * w3)
        r0 = _over(a0, a1, a2, a3, w0, w1, w2, w3, p, q, eps * r0)
        r1 = _over(b0, b1, b2, b3, w0, w1, w2, w3, p, q, eps * r1)
        r2 = _over(c0, c1, c2, c3, w0, w1, w2, w3, p, q, eps * r2)
        r3 = _over(d0, d1, d2, d3, w0, w1, w2, w3, p, q, eps * r3)
        p, q = reciprocal(r0 * r1), reciprocal(r2 * r3)
        w0 = _over(a0, b0, c0, d0, r0, r1, r2, r3, p, q, eps * w0)
        w1 = _over(a1, b1, c1, d1, r0, r1, r2, r3, p, q, eps * w1)
        w2 = _over(a2, b2, c2, d2, r0, r1, r2, r3, p, q, eps * w2)
        w3 = _over(a3, b3, c3, d3, r0, r1, r2, r3, p, q, eps * w3)
    u0, u1, u2, u3 = reciprocal(r0), reciprocal(r1), reciprocal(r2), reciprocal(r3)
    _store_row(mix, a0, b0, c0, d0, u0, u1, u2, u3, reciprocal(w0), real)
    _store_row(mix + 4, a1, b1, c1, d1, u0, u1, u2, u3, reciprocal(w1), real)
    _store_row(mix + 8, a2, b2, c2, d2, u0, u1, u2, u3, reciprocal(w2), real)
    _store_row(mix + 12, a3, b3, c3, d3, u0, u1, u2, u3, reciprocal(w3), real)


@gluon.jit
def _store_row(to, a, b, c, d, u0, u1, u2, u3, v, real):
    gl.store(to, a * u0 * v, mask=real)
    gl.store(to + 1, b * u1 * v, mask=real)
    gl.store(to + 2, c * u2 * v, mask=real)
    gl.store(to + 3, d * u3 * v, mask=real)
