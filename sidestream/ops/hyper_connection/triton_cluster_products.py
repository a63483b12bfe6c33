"""Products of ``triton_cluster``: new streams of a cluster's rows by ``fn``, each processor its columns of both.

Factors wait in registers, 48 a thread, so that a processor has a multiprocessor to itself; or in shared memory, 128 KB,
which leaves room for programs of the kernel in front, beside which they then come.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sidestream.ops.hyper_connection.triton_cluster_parts import in_memory, narrowed, over_processors, upper_bits


@gluon.jit
def _rows_and_columns(depth: gl.constexpr, C: gl.constexpr, W: gl.constexpr, layout: gl.constexpr):
    """Of [C * W, 32, depth]: the warp, the row of ``fn`` and the column of its share."""
    b = gl.arange(0, C * W, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    m = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    return b, m, gl.arange(0, depth, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]


@gluon.jit
def factors_in_registers(fn, H: gl.constexpr, C: gl.constexpr, W: gl.constexpr, products: gl.constexpr):
    """[C * W, 32, 64] of ``fn``: each warp's columns, a run of one stream's. The last eight rows are zero."""
    b, m, k = _rows_and_columns(64, C, W, gl.DotOperandLayout(0, products, 4))
    run = b % W * 64
    at = run // (H // C) * H + b // W * (H // C) + run % (H // C)
    return gl.load(fn + (at + m * (4 * H) + k), mask=(m < 24) & (k >= 0), other=0.0)


@gluon.jit
def factors_to_memory(fn, H: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """Four of [C * W, 32, 32], each warp's columns of a stream. They are there for a thread's own use behind
    ``wait_group``, for others' behind a barrier too. In the last eight rows may be anything."""
    b, m, k = _rows_and_columns(32, C, W, over_processors([1, 1, 4], [1, 4, 8], [W, 1, 1], C))
    places = fn + (b // W * (H // C) + b % W * 32 + m * (4 * H) + k)
    known = (m < 24) & (k >= 0)
    memory: gl.constexpr = in_memory(C, 16, 2, [2, 1, 0])
    first = gl.allocate_shared_memory(gl.float32, [C * W, 32, 32], memory)
    second = gl.allocate_shared_memory(gl.float32, [C * W, 32, 32], memory)
    third = gl.allocate_shared_memory(gl.float32, [C * W, 32, 32], memory)
    fourth = gl.allocate_shared_memory(gl.float32, [C * W, 32, 32], memory)
    async_copy.async_copy_global_to_shared(first, places, mask=known)
    async_copy.async_copy_global_to_shared(second, places + H, mask=known)
    async_copy.async_copy_global_to_shared(third, places + 2 * H, mask=known)
    async_copy.async_copy_global_to_shared(fourth, places + 3 * H, mask=known)
    async_copy.commit_group()
    return first, second, third, fourth


@gluon.jit
def _in_terms(factor, terms: gl.constexpr):
    """fp32 as terms whose products with bf16 are exact, the smallest first."""
    if terms == 2:
        # Elements of x have 8 bits, so they may have 11. The last 2 of the 24 bits of a factor are left out.
        last = upper_bits(factor)
        first, middle = factor - last, last
    else:
        last = narrowed(factor)
        rest = factor - last.to(gl.float32)
        middle = narrowed(rest)
        first = narrowed(rest - middle.to(gl.float32))
    return first, middle, last


@gluon.jit
def _added(sums, factor, x, terms: gl.constexpr):
    """sums and products of terms and bf16 ``x``."""
    if terms == 2:
        x = x.to(gl.float32)
        sums = mma_v2(factor[0], x, sums, input_precision="tf32")
        sums = mma_v2(factor[2], x, sums, input_precision="tf32")
    else:
        sums = mma_v2(factor[0], x, sums)
        sums = mma_v2(factor[1], x, sums)
        sums = mma_v2(factor[2], x, sums)
    return sums


@gluon.jit
def _of_warps(tile, depth: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """[C * W, depth, 8 or 16] in shared memory. Fewer rows than 8 stand there 8 / R times each."""
    tile = tile.reshape((C * W, depth, R))
    if R == 4:
        tile = gl.join(tile, tile).reshape((C * W, depth, 8))
    # What Triton itself takes for a conversion is that of all processors together.
    return gl.allocate_shared_memory(gl.bfloat16, tile.shape, in_memory(C, 8, 4, [1, 2, 0]), tile)


@gluon.jit
def multiplied(
    n0,
    n1,
    n2,
    n3,
    factor,
    R: gl.constexpr,
    C: gl.constexpr,
    W: gl.constexpr,
    terms: gl.constexpr,
    held: gl.constexpr,
    columns: gl.constexpr,
    products: gl.constexpr,
):
    """[C, 32, 8 or 16] sums over a processor's columns. ``factor`` is shared memory if it is ``held`` there."""
    rows: gl.constexpr = 8 if R < 8 else R
    share: gl.constexpr = n0.shape[2]
    # What a join of blocked layouts is like across processors, Triton does not know.
    linear: gl.constexpr = gl.to_linear_layout(columns, n0.shape)
    n0 = gl.convert_layout(n0, linear, assert_trivial=True)
    n1 = gl.convert_layout(n1, linear, assert_trivial=True)
    n2 = gl.convert_layout(n2, linear, assert_trivial=True)
    n3 = gl.convert_layout(n3, linear, assert_trivial=True)
    given: gl.constexpr = gl.DotOperandLayout(1, products, 4)
    sums = gl.zeros([C * W, 32, rows], gl.float32, layout=products)
    if held:
        async_copy.wait_group(0)
        x0 = _of_warps(n0.permute((0, 2, 1)), share // W, R, C, W)
        x1 = _of_warps(n1.permute((0, 2, 1)), share // W, R, C, W)
        x2 = _of_warps(n2.permute((0, 2, 1)), share // W, R, C, W)
        x3 = _of_warps(n3.permute((0, 2, 1)), share // W, R, C, W)
        placed: gl.constexpr = gl.DotOperandLayout(0, products, 4)
        sums = _added(sums, _in_terms(factor[0].load(placed), terms), x0.load(given), terms)
        sums = _added(sums, _in_terms(factor[1].load(placed), terms), x1.load(given), terms)
        sums = _added(sums, _in_terms(factor[2].load(placed), terms), x2.load(given), terms)
        sums = _added(sums, _in_terms(factor[3].load(placed), terms), x3.load(given), terms)
    else:
        ready = _in_terms(factor, terms)
        tile = gl.join(gl.join(n0, n2), gl.join(n1, n3)).permute((0, 3, 4, 2, 1))
        x = _of_warps(tile, 64, R, C, W)
        sums = _added(sums, ready, x.load(given), terms)
    sums = gl.allocate_shared_memory(gl.float32, sums.shape, in_memory(C, 1, 1, [2, 1, 0]), sums)
    # A thread adds up what all warps have for its places.
    sums = sums.load(over_processors([W, 1, 1], [1, 4, 8], [1, 8, W // 8], C))
    return gl.sum(sums.reshape((C, W, 32, rows)), axis=1)


@gluon.jit
def publish(sums, partials, T, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """[C, 32, 8 or 16] to partials [T, C, 32], without the last eight."""
    rows: gl.constexpr = 8 if R < 8 else R
    layout: gl.constexpr = over_processors([1, 1, 1], [1, 4, 8], [1, 8, W // 8], C)
    sums = gl.convert_layout(sums, layout, assert_trivial=True)
    c = gl.arange(0, C, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    m = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    n = gl.arange(0, rows, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    row = gl.program_id(0) * R + n // (rows // R)
    kept = (n % (rows // R) == 0) & (row < T) & (m < 24)
    gl.store(partials + (row.to(gl.int64) * C + c) * 32 + m, sums, mask=kept)
