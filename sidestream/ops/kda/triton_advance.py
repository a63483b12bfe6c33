"""A decode step of Kimi Delta Attention with loads ordered by hand (Gluon, Hopper, heads of 128).

A program is one head of one row. Its 64 KB of state are on their way to shared memory before anything else is read, so
that no register waits for them, and three programs a multiprocessor hide each other's latency. What counts is then how
many loads wait for one another: here slot and position, then all else at once, then the low-rank products. One warp
convolves queries, one keys, one values; rows of the state are read and written whole. What the new state recalls is
taken from the old one, ``q (S + k e) = q S + (q k) e``: one pass for both products, a second that writes.

Gluon has no interpreter: only a GPU tests this as it is.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

WARPS = 4
MOST_TAPS = 4


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def advance(
    projected,
    conv_state,
    state,
    out,
    expanded,
    conv_weight,
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
    length: gl.constexpr,
    bounded: gl.constexpr,
    overlap: gl.constexpr,
    releases: gl.constexpr,
):
    """As ``triton_decode``'s kernel, for four warps, ``dim`` 128 and up to four taps. The low-rank products stand in
    ``expanded`` [2, rows, heads * dim]; nothing else that an earlier kernel of the step writes is read before
    ``gdc_wait``, except what came before both. The convolution ring has ``length`` rows a slot: the token at position
    p is in row ``p % length``. ``releases``: the next kernel may start when the state is stored, and must read nothing
    of this before its wait."""
    rows: gl.constexpr = 32
    by_row: gl.constexpr = gl.BlockedLayout([8, 4], [1, 32], [4, 1], [1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, by_row)
    of_columns: gl.constexpr = gl.SliceLayout(0, by_row)
    by_tap: gl.constexpr = gl.BlockedLayout([1, 4, 4], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    by_kind: gl.constexpr = gl.SliceLayout(1, by_tap)
    by_channel: gl.constexpr = gl.BlockedLayout([4, 4], [1, 32], [1, 4], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    t = gl.program_id(1).to(gl.int64)
    position = gl.load(start + t).to(gl.int32)
    slot = gl.load(slots + t).to(gl.int64)
    column = gl.arange(0, dim, layout=of_columns)
    k_row = gl.arange(0, dim, layout=of_rows)
    known = (k_row < gl.where(position > 0, dim, 0))[:, None]  # a fresh sequence starts from zeros
    held = gl.allocate_shared_memory(gl.float32, [dim, dim], plain)
    h = gl.program_id(0)
    old = state + ((slot * versions + position % versions) * heads + h) * (dim * dim)
    new = state + ((slot * versions + (position + 1) % versions) * heads + h) * (dim * dim)
    async_copy.async_copy_global_to_shared(held, old + k_row[:, None] * dim + column[None, :], mask=known)
    async_copy.commit_group()
    gl.thread_barrier()  # or ptxas sends for the state when the convolution is done

    # kinds: query, key, value, and a fourth that is nothing
    width = heads * dim
    kind = gl.arange(0, 4, layout=gl.SliceLayout(1, by_kind))
    channel = h * dim + gl.arange(0, dim, layout=gl.SliceLayout(0, by_kind))
    place = kind[:, None] * width + channel[None, :]
    real = (kind < 3)[:, None]
    tap = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, by_tap)))
    wanted = position - (taps - 1) + tap
    ring = slot * length + wanted % length
    carried = ((tap < taps - 1) & (wanted >= 0))[None, :][:, :, None] & real[:, None, :]
    past = gl.load(conv_state + ring[None, :][:, :, None] * (3 * width) + place[:, None, :], mask=carried, other=0.0)
    scale = gl.load(
        conv_weight + place[:, None, :] * weight_channel + tap[None, :][:, :, None] * weight_tap,
        mask=(tap < taps)[None, :][:, :, None] & real[:, None, :],
        other=0.0,
    )
    rate = gl.load(a_log + h)
    bias = gl.load(dt_bias + h * dim + column)
    normal = gl.load(norm_weight + column).to(gl.float32)
    given = projected + t * projected_row
    own = gl.load(given + place, mask=real, other=0.0)
    beta = gl.load(given + 3 * width + 2 * dim + h).to(gl.float32)

    last = (tap == taps - 1)[None, :][:, :, None]
    window = gl.where(last, own.to(gl.float32)[:, None, :], past.to(gl.float32))
    mixed = gl.sum(window * scale, axis=1)
    mixed = mixed * _sigmoid(mixed)
    unit = 1.0 / gl.sqrt(gl.sum(mixed * mixed, axis=1) + l2_eps)
    convolved = gl.allocate_shared_memory(gl.float32, [4, dim], plain)
    convolved.store(mixed * gl.where(kind < 2, unit, 1.0)[:, None])
    # the row written next may be the oldest one read, by the same thread
    gl.store(conv_state + (slot * length + position % length) * (3 * width) + place, own, mask=real)
    beta = _sigmoid(beta)
    rate = gl.exp(rate)
    kinds = convolved.load(by_channel)
    which = gl.arange(0, 4, layout=gl.SliceLayout(1, by_channel))[:, None]
    query = gl.convert_layout(gl.sum(gl.where(which == 0, kinds, 0.0), axis=0), of_columns, assert_trivial=True)
    key = gl.convert_layout(gl.sum(gl.where(which == 1, kinds, 0.0), axis=0), of_columns, assert_trivial=True)
    value = gl.convert_layout(gl.sum(gl.where(which == 2, kinds, 0.0), axis=0), of_columns, assert_trivial=True)
    kq = gl.sum(key * query, axis=0)

    if overlap:
        gdc_wait()
    forget = gl.load(expanded + t * width + h * dim + column) + bias
    gate = gl.load(expanded + expanded_part + t * width + h * dim + column)
    if bounded:
        decay = lower_bound * _sigmoid(rate * forget)
    else:
        decay = -rate * gl.where(forget > 20.0, forget, gl.log(1.0 + gl.exp(gl.minimum(forget, 20.0))))
    kept = gl.exp(decay)
    # apart, lest a barrier come behind each
    query_kept = gl.allocate_shared_memory(gl.float32, [dim], line)
    key_kept = gl.allocate_shared_memory(gl.float32, [dim], line)
    channel_kept = gl.allocate_shared_memory(gl.float32, [dim], line)
    channel_key = gl.allocate_shared_memory(gl.float32, [dim], line)
    query_kept.store(query * kept)
    key_kept.store(key * kept)
    channel_kept.store(kept)
    channel_key.store(key)

    async_copy.wait_group(0)
    recalls = gl.zeros([rows, dim], gl.float32, by_row)
    sees = gl.zeros([rows, dim], gl.float32, by_row)
    for i in gl.static_range(dim // rows):
        memory = held.slice(i * rows, rows).load(by_row)
        sees += memory * query_kept.slice(i * rows, rows).load(of_rows)[:, None]
        recalls += memory * key_kept.slice(i * rows, rows).load(of_rows)[:, None]
    error = (value - gl.convert_layout(gl.sum(recalls, axis=0), of_columns, assert_trivial=True)) * beta
    square = gl.arange(0, rows, layout=of_rows)[:, None] * dim + column[None, :]
    for i in gl.static_range(dim // rows):
        memory = held.slice(i * rows, rows).load(by_row)
        left = memory * channel_kept.slice(i * rows, rows).load(of_rows)[:, None]
        moved = channel_key.slice(i * rows, rows).load(of_rows)[:, None] * error[None, :]
        gl.store(new + i * rows * dim + square, left + moved)
    if releases:
        gdc_launch_dependents()
    seen = gl.convert_layout(gl.sum(sees, axis=0), of_columns, assert_trivial=True)
    read = (seen + kq * error) * (dim**-0.5)
    inverse = 1.0 / gl.sqrt(gl.sum(read * read, axis=0) / dim + norm_eps)
    normed = read * inverse * normal * _sigmoid(gate)
    gl.store(out + t * width + h * dim + column, normed.to(out.dtype.element_ty))
