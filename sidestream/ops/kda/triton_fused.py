"""A decode step of Kimi Delta Attention as one kernel that streams states (Gluon, Hopper, heads of 128, 16 bit).

A program is one head of some rows. Both low-rank products of all its rows are one product each of tensor cores, kept in
registers; then it goes from row to row. Its shared memory has room for three parts of states: while one is worked on,
two are on their way, across rows. Either a part is 64 columns of a state, two programs share a multiprocessor, and the
parts of a state meet in the norm; or it is a whole state, read in one piece, and programs are alone. Only as many
programs are made as find a place at once.

What is sent for before ``gdc_wait``: weights, slots and positions of the step, rows of the convolution ring and states.
A kernel may start before its predecessor ended, and that one before its own, so nothing in a row of such kernels may
write these. None does: a step's slots and positions are staged by a copy, which starts when all before it has ended
(the last step, slots that were copied, chunks of prompts) and lets kernels start when it has ended itself; behind it,
a layer's states and ring are written by this kernel alone.

Gluon has no interpreter: only a GPU tests this as it is.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sidestream.ops.kda.triton_advance import _sigmoid

PLACES = {64: 2 * 132, 128: 132}
"""Programs that an H200 holds at once, by columns of a part."""
MOST_ROWS = {64: 16, 128: 32}
"""Of a program: what its products of tensor cores take, in steps of 16."""


def registers(columns: int, warps: int) -> int:
    """Of a thread, so that a multiprocessor holds its programs."""
    return min(65536 * columns // 128 // (32 * warps), 255)


@gluon.jit
def _send(buffer, state, place, part, position, known, columns: gl.constexpr):
    """Ask for a part of the row's state at ``place``: zeros of a fresh sequence or of none."""
    by_row: gl.constexpr = gl.BlockedLayout([4, 4], [128 // columns, columns // 4], [gl.num_warps(), 1], [1, 0])
    k = gl.arange(0, 128, layout=gl.SliceLayout(1, by_row))
    column = part * columns + gl.arange(0, columns, layout=gl.SliceLayout(0, by_row))
    there = (k < gl.where((position > 0) & known, 128, 0))[:, None]
    source = state + place * (128 * 128) + k[:, None] * 128 + column[None, :]
    async_copy.async_copy_global_to_shared(buffer, source, mask=there)
    async_copy.commit_group()


@gluon.jit
def _recall(buffer, value, key_kept, query_kept, strength, columns: gl.constexpr):
    """The next part that was sent for, and of its columns: what the state has to learn, what the query sees of the old
    one. Behind it all have read the buffer."""
    by_row: gl.constexpr = gl.BlockedLayout([4, 4], [128 // columns, columns // 4], [gl.num_warps(), 1], [1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, by_row)
    async_copy.wait_group(2)
    memory = buffer.load(by_row)
    error = (value - gl.sum(memory * key_kept.load(of_rows)[:, None], axis=0)) * strength
    return memory, error, gl.sum(memory * query_kept.load(of_rows)[:, None], axis=0)


@gluon.jit
def _learn(target, memory, error, channel_kept, channel_key, columns: gl.constexpr):
    """Store a part of the new state."""
    by_row: gl.constexpr = gl.BlockedLayout([4, 4], [128 // columns, columns // 4], [gl.num_warps(), 1], [1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, by_row)
    square = (
        gl.arange(0, 128, layout=of_rows)[:, None] * 128
        + gl.arange(0, columns, layout=gl.SliceLayout(0, by_row))[None, :]
    )
    moved = channel_key.load(of_rows)[:, None] * error[None, :]
    gl.store(target + square, memory * channel_kept.load(of_rows)[:, None] + moved)


@gluon.jit(do_not_specialize=["total", "share"])
def fused(
    projected,
    conv_state,
    state,
    out,
    expand,
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
    total,
    share,
    heads,
    l2_eps,
    versions: gl.constexpr,
    dim: gl.constexpr,
    taps: gl.constexpr,
    length: gl.constexpr,
    bounded: gl.constexpr,
    overlap: gl.constexpr,
    releases: gl.constexpr,
    columns: gl.constexpr,
    most: gl.constexpr,
):
    """As ``triton_advance.advance`` with the low-rank products made here, for ``share`` of the ``total`` rows, ``most``
    at most, and ``columns`` 64 or 128. ``releases``: the next kernel may start when the last row is begun; it must read
    nothing of this before its wait."""
    by_row: gl.constexpr = gl.BlockedLayout([4, 4], [128 // columns, columns // 4], [gl.num_warps(), 1], [1, 0])
    of_columns: gl.constexpr = gl.SliceLayout(0, by_row)
    across: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([8, 4], [1, 32], [gl.num_warps(), 1], [1, 0]))
    by_tap: gl.constexpr = gl.BlockedLayout([1, 4, 4], [1, 1, 32], [4, 1, gl.num_warps() // 4], [2, 1, 0])
    by_kind: gl.constexpr = gl.SliceLayout(1, by_tap)
    product: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, gl.num_warps()], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, product, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, product, 8)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    h = gl.program_id(0)
    first = gl.program_id(1) * share
    last = gl.minimum(first + share, total) - 1
    second = gl.minimum(first + 1, last)
    third = gl.minimum(first + 2, last)
    slot = gl.load(slots + first).to(gl.int64)
    position = gl.load(start + first).to(gl.int32)
    next_slot = gl.load(slots + second).to(gl.int64)
    next_position = gl.load(start + second).to(gl.int32)
    third_slot = gl.load(slots + third).to(gl.int64)
    third_position = gl.load(start + third).to(gl.int32)
    held = gl.allocate_shared_memory(gl.float32, [3, dim, columns], flat)
    place = (slot * versions + position % versions) * heads + h
    next_place = (next_slot * versions + next_position % versions) * heads + h
    third_place = (third_slot * versions + third_position % versions) * heads + h
    _send(held.index(0), state, place, 0, position, True, columns)
    if columns == dim:
        _send(held.index(1), state, next_place, 0, next_position, first < last, columns)
        _send(held.index(2), state, third_place, 0, third_position, first + 1 < last, columns)
    else:
        _send(held.index(1), state, place, 1, position, True, columns)
        _send(held.index(2), state, next_place, 0, next_position, first < last, columns)
    gl.thread_barrier()  # or ptxas sends for the states when the convolution is done

    # kinds: query, key, value, and a fourth that is nothing
    width = heads * dim
    kind = gl.arange(0, 4, layout=gl.SliceLayout(1, by_kind))
    own_place = kind[:, None] * width + (h * dim + gl.arange(0, dim, layout=gl.SliceLayout(0, by_kind)))[None, :]
    real = (kind < 3)[:, None]
    tap = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, by_tap)))
    wanted = position - (taps - 1) + tap
    ring = slot * length + wanted % length
    carried = ((tap < taps - 1) & (wanted >= 0))[None, :][:, :, None] & real[:, None, :]
    past = gl.load(
        conv_state + ring[None, :][:, :, None] * (3 * width) + own_place[:, None, :], mask=carried, other=0.0
    )
    scale = gl.load(
        conv_weight + own_place[:, None, :] * weight_channel + tap[None, :][:, :, None] * weight_tap,
        mask=(tap < taps)[None, :][:, :, None] & real[:, None, :],
        other=0.0,
    )
    rate = gl.exp(gl.load(a_log + h))
    channel = gl.arange(0, dim, layout=across)
    bias = gl.load(dt_bias + h * dim + channel)
    normal = gl.load(norm_weight + channel).to(gl.float32)
    depth = gl.arange(0, dim, layout=gl.SliceLayout(1, right))
    output = gl.arange(0, dim, layout=gl.SliceLayout(0, right))
    factor = expand + h * (dim * dim) + output[None, :] * dim + depth[:, None]
    forget_weight = gl.load(factor)
    gate_weight = gl.load(factor + width * dim)
    if overlap:
        gdc_wait()

    given = projected + first.to(gl.int64) * projected_row
    own = gl.load(given + own_place, mask=real, other=0.0)
    beta = gl.load(given + 3 * width + 2 * dim + h).to(gl.float32)
    member = gl.arange(0, most, layout=gl.SliceLayout(1, left))
    low = (
        given + 3 * width + member[:, None] * projected_row + gl.arange(0, dim, layout=gl.SliceLayout(0, left))[None, :]
    )
    known = (member < last - first + 1)[:, None]
    nothing = gl.zeros([most, dim], gl.float32, layout=product)
    forgets = mma_v2(gl.load(low, mask=known, other=0.0), forget_weight, nothing)
    gates = mma_v2(gl.load(low + dim, mask=known, other=0.0), gate_weight, nothing)
    row = gl.arange(0, most, layout=gl.SliceLayout(1, product))[:, None]

    # apart, lest a barrier come behind each
    convolved = gl.allocate_shared_memory(gl.float32, [4, dim], line)
    forget_line = gl.allocate_shared_memory(gl.float32, [dim], line)
    gate_line = gl.allocate_shared_memory(gl.float32, [dim], line)
    norm_line = gl.allocate_shared_memory(gl.float32, [dim], line)
    query_kept = gl.allocate_shared_memory(gl.float32, [dim], line)
    key_kept = gl.allocate_shared_memory(gl.float32, [dim], line)
    channel_kept = gl.allocate_shared_memory(gl.float32, [dim], line)
    channel_key = gl.allocate_shared_memory(gl.float32, [dim], line)
    norm_line.store(normal)
    column = gl.arange(0, columns, layout=of_columns)
    newest = (tap == taps - 1)[None, :][:, :, None]

    for i in range(last - first + 1):
        t = first + i
        if releases and t == last:
            gdc_launch_dependents()
        fourth = gl.minimum(t + 3, last)
        fourth_slot = gl.load(slots + fourth).to(gl.int64)
        fourth_position = gl.load(start + fourth).to(gl.int32)
        mixed = gl.sum(gl.where(newest, own.to(gl.float32)[:, None, :], past.to(gl.float32)) * scale, axis=1)
        mixed = mixed * _sigmoid(mixed)
        unit = 1.0 / gl.sqrt(gl.sum(mixed * mixed, axis=1) + l2_eps)
        convolved._reinterpret(gl.float32, [4, dim], flat).store(mixed * gl.where(kind < 2, unit, 1.0)[:, None])
        forget_line.store(gl.sum(gl.where(row == i, forgets, 0.0), axis=0))
        gate_line.store(gl.sum(gl.where(row == i, gates, 0.0), axis=0))
        strength = _sigmoid(beta)
        query = convolved.index(0).load(across)
        # behind the barrier that the load above needs: the row written may be the oldest one read
        gl.store(conv_state + (slot * length + position % length) * (3 * width) + own_place, own, mask=real)

        # of the next row: here already, to be there in time
        given = projected + gl.minimum(t + 1, last).to(gl.int64) * projected_row
        wanted = next_position - (taps - 1) + tap
        ring = next_slot * length + wanted % length
        carried = ((tap < taps - 1) & (wanted >= 0))[None, :][:, :, None] & real[:, None, :] & (t < last)
        past = gl.load(
            conv_state + ring[None, :][:, :, None] * (3 * width) + own_place[:, None, :], mask=carried, other=0.0
        )
        own = gl.load(given + own_place, mask=real, other=0.0)
        beta = gl.load(given + 3 * width + 2 * dim + h).to(gl.float32)

        key = convolved.index(1).load(across)
        forget = forget_line.load(across) + bias
        if bounded:
            decay = lower_bound * _sigmoid(rate * forget)
        else:
            decay = -rate * gl.where(forget > 20.0, forget, gl.log(1.0 + gl.exp(gl.minimum(forget, 20.0))))
        kept = gl.exp(decay)
        kq = gl.sum(key * query, axis=0)
        query_kept.store(query * kept)
        key_kept.store(key * kept)
        channel_kept.store(kept)
        channel_key.store(key)

        new = state + ((slot * versions + (position + 1) % versions) * heads + h) * (dim * dim)
        fourth_place = (fourth_slot * versions + fourth_position % versions) * heads + h
        buffer = held.index(i * (dim // columns) % 3)
        value = convolved.index(2).slice(0, columns).load(of_columns)
        memory, error, seen = _recall(buffer, value, key_kept, query_kept, strength, columns)
        if columns == dim:
            _send(buffer, state, fourth_place, 0, fourth_position, t + 2 < last, columns)
        else:
            _send(buffer, state, next_place, 1, next_position, t < last, columns)
        _learn(new, memory, error, channel_kept, channel_key, columns)
        read = (seen + kq * error) * (dim**-0.5)
        squares = gl.sum(read * read, axis=0)
        target = out + t.to(gl.int64) * width + h * dim + column
        if columns < dim:
            buffer = held.index((2 * i + 1) % 3)
            value = convolved.index(2).slice(columns, columns).load(of_columns)
            memory, error, seen = _recall(buffer, value, key_kept, query_kept, strength, columns)
            _send(buffer, state, third_place, 0, third_position, t + 1 < last, columns)
            _learn(new + columns, memory, error, channel_kept, channel_key, columns)
            other = (seen + kq * error) * (dim**-0.5)
            squares += gl.sum(other * other, axis=0)
        inverse = 1.0 / gl.sqrt(squares / dim + norm_eps)
        normed = read * inverse * norm_line.slice(0, columns).load(of_columns)
        normed = normed * _sigmoid(gate_line.slice(0, columns).load(of_columns))
        gl.store(target, normed.to(out.dtype.element_ty))
        if columns < dim:
            normed = other * inverse * norm_line.slice(columns, columns).load(of_columns)
            normed = normed * _sigmoid(gate_line.slice(columns, columns).load(of_columns))
            gl.store(target + columns, normed.to(out.dtype.element_ty))
        slot, position = next_slot, next_position
        next_slot, next_position, next_place = third_slot, third_position, third_place
        third_slot, third_position, third_place = fourth_slot, fourth_position, fourth_place
    async_copy.wait_group(0)
