"""A decode step of Kimi Delta Attention with loads ordered by hand (Gluon, Hopper, heads of 128).

A program is one head of one row. Its 64 KB of state are on their way to shared memory before anything else is read, so
that no register waits for them and three programs a multiprocessor hide each other's convolution. Rows of the state are
read and written whole: pieces of 128 bytes cost a tenth of the memory's rate. What the new state recalls is taken from
the old one, ``q (S + k e) = q S + (q k) e``: one pass for both products, a second that writes.

Gluon has no interpreter: only a GPU tests this as it is.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_wait


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def _convolved(
    x, conv_state, conv_weight, tap, row, exists, channel, ring, weight_channel, weight_tap, taps: gl.constexpr
):
    """silu of the convolution of one token, fp32. ``row`` and ``exists`` are of its carried ``tap``, oldest first,
    padded to four; what the ring holds where none exists is not read."""
    past = gl.load(conv_state + row[:, None] * ring + channel[None, :], mask=exists[:, None], other=0.0)
    place = channel[None, :] * weight_channel + tap[:, None] * weight_tap
    scale = gl.load(conv_weight + place, mask=(tap < taps - 1)[:, None], other=0.0)
    last = gl.load(conv_weight + channel * weight_channel + (taps - 1) * weight_tap)
    total = gl.sum(past.to(gl.float32) * scale, axis=0) + x.to(gl.float32) * last
    return total * _sigmoid(total)


@gluon.jit(do_not_specialize=["expanded_part"])
def advance(
    projected,
    conv_state,
    state,
    out,
    expanded,
    conv_weight,
    carry_rows,
    window_rows,
    keep_rows,
    dt_bias,
    a_log,
    norm_weight,
    slots,
    start,
    lower_bound,
    norm_eps,
    projected_row,
    weight_channel,
    weight_tap,
    expanded_part,
    heads,
    l2_eps,
    versions: gl.constexpr,
    dim: gl.constexpr,
    taps: gl.constexpr,
    bounded: gl.constexpr,
    overlap: gl.constexpr,
    num_warps: gl.constexpr,
):
    """As ``triton_decode``'s kernel with the low-rank products already in ``expanded`` [2, rows, heads * dim]; nothing
    else that an earlier kernel of the step writes is read before ``gdc_wait``. At most five taps."""
    rows: gl.constexpr = 8 * num_warps
    parts: gl.constexpr = dim // rows
    by_row: gl.constexpr = gl.BlockedLayout([8, 4], [1, 32], [num_warps, 1], [1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, by_row)
    of_columns: gl.constexpr = gl.SliceLayout(0, by_row)
    by_tap: gl.constexpr = gl.BlockedLayout([4, 1], [1, 32], [1, num_warps], [1, 0])
    line_layout: gl.constexpr = gl.SliceLayout(0, by_tap)
    tile: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    h = gl.program_id(0)
    t = gl.program_id(1).to(gl.int64)
    position = gl.load(start + t)
    slot = gl.load(slots + t).to(gl.int64)
    old = state + ((slot * versions + position % versions) * heads + h) * (dim * dim)
    new = state + ((slot * versions + (position + 1) % versions) * heads + h) * (dim * dim)
    k_row = gl.arange(0, rows, layout=of_rows)
    column = gl.arange(0, dim, layout=of_columns)
    square = k_row[:, None] * dim + column[None, :]
    held = gl.allocate_shared_memory(gl.float32, [parts, rows, dim], tile)
    for part in gl.static_range(parts):
        async_copy.async_copy_global_to_shared(held.index(part), old + part * (rows * dim) + square)
    async_copy.commit_group()

    tap = gl.arange(0, 4, layout=gl.SliceLayout(1, by_tap))
    carried = tap < taps - 1
    exists = gl.load(window_rows + t * taps + tap, mask=carried, other=0) != 0
    row = gl.load(carry_rows + t * (taps - 1) + tap, mask=carried, other=0)
    keep = gl.load(keep_rows + t)
    width = heads * dim
    ring = 3 * width
    line = gl.arange(0, dim, layout=line_layout)
    channel = h * dim + line
    given = projected + t * projected_row
    x_q = gl.load(given + channel)
    x_k = gl.load(given + width + channel)
    x_v = gl.load(given + 2 * width + channel)
    beta = _sigmoid(gl.load(given + 3 * width + 2 * dim + h).to(gl.float32))
    rate = gl.exp(gl.load(a_log + h))
    bias = gl.load(dt_bias + channel)
    q = _convolved(x_q, conv_state, conv_weight, tap, row, exists, channel, ring, weight_channel, weight_tap, taps)
    k = _convolved(
        x_k, conv_state, conv_weight, tap, row, exists, width + channel, ring, weight_channel, weight_tap, taps
    )
    v = _convolved(
        x_v, conv_state, conv_weight, tap, row, exists, 2 * width + channel, ring, weight_channel, weight_tap, taps
    )
    gl.thread_barrier()  # the ring row written next is one that other threads may have just read
    gl.store(conv_state + keep * ring + channel, x_q)
    gl.store(conv_state + keep * ring + width + channel, x_k)
    gl.store(conv_state + keep * ring + 2 * width + channel, x_v)
    q = q / gl.sqrt(gl.sum(q * q, axis=0) + l2_eps)
    k = k / gl.sqrt(gl.sum(k * k, axis=0) + l2_eps)
    kq = gl.sum(k * q, axis=0)
    scale = gl.load(norm_weight + gl.arange(0, dim, layout=of_columns)).to(gl.float32)

    if overlap:
        gdc_wait()
    raw = gl.load(expanded + t * width + channel).to(gl.float32) + bias
    gate = gl.load(expanded + expanded_part + t * width + h * dim + column).to(gl.float32)
    if bounded:
        decay = lower_bound * _sigmoid(rate * raw)
    else:
        decay = -rate * gl.where(raw > 20.0, raw, gl.log(1.0 + gl.exp(gl.minimum(raw, 20.0))))
    vectors = gl.allocate_shared_memory(gl.float32, [4, dim], plain)
    vectors.index(0).store(q)
    vectors.index(1).store(k)
    vectors.index(2).store(gl.exp(decay))
    vectors.index(3).store(v)

    async_copy.wait_group(0)
    known = position > 0
    recalls = gl.zeros([rows, dim], gl.float32, by_row)
    sees = gl.zeros([rows, dim], gl.float32, by_row)
    for part in gl.static_range(parts):
        kept = vectors.index(2).slice(part * rows, rows).load(of_rows)
        memory = gl.where(known, held.index(part).load(by_row), 0.0) * kept[:, None]
        query = vectors.index(0).slice(part * rows, rows).load(of_rows)
        key = vectors.index(1).slice(part * rows, rows).load(of_rows)
        recalls += memory * key[:, None]
        sees += memory * query[:, None]
    seen = gl.sum(sees, axis=0)
    error = (vectors.index(3).load(of_columns) - gl.sum(recalls, axis=0)) * beta
    for part in gl.static_range(parts):
        kept = vectors.index(2).slice(part * rows, rows).load(of_rows)
        memory = gl.where(known, held.index(part).load(by_row), 0.0) * kept[:, None]
        key = vectors.index(1).slice(part * rows, rows).load(of_rows)
        gl.store(new + part * (rows * dim) + square, memory + key[:, None] * error[None, :])
    mixed = (seen + kq * error) * (dim**-0.5)
    inverse = 1.0 / gl.sqrt(gl.sum(mixed * mixed, axis=0) / dim + norm_eps)
    normed = mixed * inverse * scale * _sigmoid(gate)
    gl.store(out + t * width + h * dim + column, normed.to(out.dtype.element_ty))
