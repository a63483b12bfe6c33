"""Products of ``triton_cluster``: new streams of a cluster's rows by ``fn``, each processor its columns of both.

Factors wait in registers, 48 a thread, so that a processor has a multiprocessor to itself; or in shared memory, 96 KB,
which leaves room beside programs of the kernel in front.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sidestream.ops.hyper_connection.triton_cluster_parts import in_memory, narrowed, over_processors, upper_bits


@gluon.jit
def _places(rows: gl.constexpr, depth: gl.constexpr, C: gl.constexpr, W: gl.constexpr, layout: gl.constexpr):
    """Of [C * W, rows, depth]: the warp, the row and the column."""
    b = gl.arange(0, C * W, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    m = gl.arange(0, rows, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    return b, m, gl.arange(0, depth, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]


@gluon.jit
def factors_in_registers(fn, H: gl.constexpr, C: gl.constexpr, W: gl.constexpr, products: gl.constexpr):
    """[C * W, 32, 64] of ``fn``: each warp's columns, a run of one stream's. The last eight rows are zero."""
    b, m, k = _places(32, 64, C, W, gl.DotOperandLayout(0, products, 4))
    run = b % W * 64
    at = run // (H // C) * H + b // W * (H // C) + run % (H // C)
    return gl.load(fn + (at + m * (4 * H) + k), mask=(m < 24) & (k >= 0), other=0.0)


@gluon.jit
def factors_to_memory(fn, H: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """Six of [C * W, 16, 32], of each warp's columns: the first 16 rows of ``fn`` for each stream, then the last eight
    for two streams one above the other, twice. They are there for a thread's own use behind ``wait_group``, for others'
    behind a barrier too."""
    b, m, k = _places(16, 32, C, W, over_processors([1, 1, 4], [1, 4, 8], [W, 1, 1], C))
    columns = fn + (b // W * (H // C) + b % W * 32 + k)
    upper, lower = columns + m * (4 * H), columns + (16 + m % 8) * (4 * H) + m // 8 * H
    return (
        _sent_for(upper, C, W),
        _sent_for(upper + H, C, W),
        _sent_for(upper + 2 * H, C, W),
        _sent_for(upper + 3 * H, C, W),
        _sent_for(lower, C, W),
        _sent_for(lower + 2 * H, C, W),
    )


@gluon.jit
def _sent_for(places, C: gl.constexpr, W: gl.constexpr):
    memory = gl.allocate_shared_memory(gl.float32, [C * W, 16, 32], in_memory(C, 16, 2, [2, 1, 0]))
    async_copy.async_copy_global_to_shared(memory, places)
    async_copy.commit_group()
    return memory


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
def publish_products(
    n0,
    n1,
    n2,
    n3,
    factor,
    partials,
    T,
    R: gl.constexpr,
    C: gl.constexpr,
    W: gl.constexpr,
    terms: gl.constexpr,
    held: gl.constexpr,
    columns: gl.constexpr,
    products: gl.constexpr,
):
    """Sums over a processor's columns to partials [T, C, 32], the first 24 of each. ``factor`` is shared memory if it
    is ``held`` there."""
    rows: gl.constexpr = 8 if R < 8 else R
    share: gl.constexpr = n0.shape[2]
    # What a join of blocked layouts is like across processors, Triton does not know.
    linear: gl.constexpr = gl.to_linear_layout(columns, n0.shape)
    n0 = gl.convert_layout(n0, linear, assert_trivial=True)
    n1 = gl.convert_layout(n1, linear, assert_trivial=True)
    n2 = gl.convert_layout(n2, linear, assert_trivial=True)
    n3 = gl.convert_layout(n3, linear, assert_trivial=True)
    given: gl.constexpr = gl.DotOperandLayout(1, products, 4)
    plain: gl.constexpr = in_memory(C, 1, 1, [2, 1, 0])
    if held:
        async_copy.wait_group(0)
        x0 = _of_warps(n0.permute((0, 2, 1)), share // W, R, C, W)
        x1 = _of_warps(n1.permute((0, 2, 1)), share // W, R, C, W)
        x2 = _of_warps(n2.permute((0, 2, 1)), share // W, R, C, W)
        x3 = _of_warps(n3.permute((0, 2, 1)), share // W, R, C, W)
        placed: gl.constexpr = gl.DotOperandLayout(0, products, 4)
        nothing = gl.zeros([C * W, 16, rows], gl.float32, layout=products)
        x = x0.load(given)
        upper = _added(nothing, _in_terms(factor[0].load(placed), terms), x, terms)
        above = _added(nothing, _in_terms(factor[4].load(placed), terms), x, terms)
        x = x1.load(given)
        upper = _added(upper, _in_terms(factor[1].load(placed), terms), x, terms)
        below = _added(nothing, _in_terms(factor[4].load(placed), terms), x, terms)
        x = x2.load(given)
        upper = _added(upper, _in_terms(factor[2].load(placed), terms), x, terms)
        above = _added(above, _in_terms(factor[5].load(placed), terms), x, terms)
        x = x3.load(given)
        upper = _added(upper, _in_terms(factor[3].load(placed), terms), x, terms)
        below = _added(below, _in_terms(factor[5].load(placed), terms), x, terms)
        m = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, products)))[None, :, None]
        upper = gl.allocate_shared_memory(gl.float32, upper.shape, plain, upper)
        lower = gl.allocate_shared_memory(gl.float32, nothing.shape, plain, gl.where(m < 8, above, below))
        lower = lower._reinterpret(gl.float32, [2 * C * W, 8, rows], plain)
        _publish(upper, partials, T, 0, 16, R, C, W, W)
        _publish(lower, partials, T, 16, 8, R, C, W, 2 * W)
    else:
        ready = _in_terms(factor, terms)
        tile = gl.join(gl.join(n0, n2), gl.join(n1, n3)).permute((0, 3, 4, 2, 1))
        x = _of_warps(tile, 64, R, C, W)
        sums = gl.zeros([C * W, 32, rows], gl.float32, layout=products)
        sums = _added(sums, ready, x.load(given), terms)
        sums = gl.allocate_shared_memory(gl.float32, sums.shape, plain, sums)
        _publish(sums, partials, T, 0, 32, R, C, W, W)


@gluon.jit
def _publish(
    sums,
    partials,
    T,
    first: gl.constexpr,
    count: gl.constexpr,
    R: gl.constexpr,
    C: gl.constexpr,
    W: gl.constexpr,
    parts: gl.constexpr,
):
    """[C * parts, count, 8 or 16] in shared memory, added up over a processor's parts in each thread, to ``count``
    numbers of partials from ``first`` on, but none beyond 24."""
    rows: gl.constexpr = 8 if R < 8 else R
    warps: gl.constexpr = [1, count // 4, 4 * W // count]
    sums = sums.load(over_processors([parts, 1, 1], [1, 4, 8], warps, C))
    sums = gl.sum(sums.reshape((C, parts, count, rows)), axis=1)
    layout: gl.constexpr = over_processors([1, 1, 1], [1, 4, 8], warps, C)
    sums = gl.convert_layout(sums, layout, assert_trivial=True)
    c = gl.arange(0, C, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    m = first + gl.arange(0, count, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    n = gl.arange(0, rows, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    row = gl.program_id(0) * R + n // (rows // R)
    kept = (n % (rows // R) == 0) & (row < T) & (m < 24)
    gl.store(partials + (row.to(gl.int64) * C + c) * 32 + m, sums, mask=kept)
