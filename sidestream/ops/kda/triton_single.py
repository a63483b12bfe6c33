"""A decode step of Kimi Delta Attention in one launch, for a row or two (Gluon, Hopper, bf16 or fp16, heads of 128).

So few states do not fill a GPU: what counts is how many trips to memory wait for one another, and that every
multiprocessor moves its share. A head belongs to a cluster of ``parts`` programs, each with as many columns of the
state, in registers. Weights, rings and states are on their way before the kernel in front has ended; behind the wait
there is one trip, for the row that was projected, and the low-rank products are of the program itself: all of the
forget gate, its columns' of the output gate. Sums over keys are of a column, so only the norm needs all parts of a
head: each writes its sum of squares into the others' shared memory, and waits for theirs when its part of the state is
stored.

Gluon has no interpreter: only a GPU tests this as it is.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MOST_TAPS = 4
GREET = gl.constexpr(
    "{ .shared .align 16 .b64 kept[3]; .reg .pred p; .reg .b32 own, size; .reg .b64 now;"
    " mov.u32 own, kept; mov.u32 size, %tid.x; setp.eq.u32 p, size, 0; mov.u32 size, %cluster_nctarank;"
    " shl.b32 size, size, 2; @p mbarrier.init.shared::cta.b64 [own], 1; @p fence.mbarrier_init.release.cluster;"
    " @p mbarrier.arrive.expect_tx.shared::cta.b64 now, [own], size;"
    " barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, own; }"
)
"""Make ready for a number of each program of the cluster, and tell them. Where it is: a barrier, the numbers behind."""
MEET = gl.constexpr("barrier.cluster.wait.acquire.aligned; mov.u32 $0, $1;")
"""Wait until all programs of the cluster are ready."""
GIVE = gl.constexpr(
    "{ .reg .pred p; .reg .b32 at, to, peer, size; mov.u32 peer, %tid.x; mov.u32 size, %cluster_nctarank;"
    " setp.lt.u32 p, peer, size; mov.u32 at, %cluster_ctarank; shl.b32 at, at, 2; add.u32 at, at, $1;"
    " @p mapa.shared::cluster.u32 to, $1, peer; @p mapa.shared::cluster.u32 at, at, peer;"
    " @p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [at + 16], $2, [to]; mov.u32 $0, $1; }"
)
"""Send a number to this program's place in every program of the cluster, a thread each."""
TAKE = gl.constexpr(
    "{ .reg .pred p; .reg .f32 a, b; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], 0; @!p bra AGAIN;"
    " ld.shared.v2.f32 {a, b}, [$1 + 16]; add.f32 $0, a, b; }"
)
"""Wait for both programs' numbers; their sum in the order of the programs."""
SIGMOID = gl.constexpr(
    "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000;"
    " rcp.approx.ftz.f32 $0, e; }"
)
"""1 / (1 + 2 ** (-x / ln 2)) in four instructions, to a few units in the last place: a division takes eight."""


@gluon.jit
def _sigmoid(x):
    return gl.inline_asm_elementwise(SIGMOID, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _log2(x):
    """Of a number from 1 on, to 2 ** -22; that of Gluon branches."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _exchange(what: gl.constexpr, operands: gl.constexpr, given):
    return gl.inline_asm_elementwise(what, operands, given, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _taken(what: gl.constexpr, meeting):
    return gl.inline_asm_elementwise(what, "=f,r,~{memory}", [meeting], dtype=gl.float32, is_pure=False, pack=1)


@gluon.constexpr_function
def _split(rank, dim, parts):
    """How programs of a cluster share a dimension of a tensor; -1 if each has all of it."""
    steps = [1 << bit for bit in range(parts.bit_length() - 1)]
    return [[step if i == dim else 0 for i in range(rank)] for step in steps]


@gluon.constexpr_function
def _blocked(size, threads, warps, order, dim, parts):
    return gl.BlockedLayout(size, threads, warps, order, cga_layout=_split(len(size), dim, parts))


@gluon.constexpr_function
def _product(warps, dim, parts):
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8], cga_layout=_split(2, dim, parts))


@gluon.constexpr_function
def _shared(order, dim, parts):
    return gl.SwizzledSharedLayout(1, 1, 1, order, cga_layout=_split(len(order), dim, parts))


@gluon.jit
def _weights(at, dim: gl.constexpr, layout: gl.constexpr):
    """Of a product, in two halves of its depth."""
    row = gl.arange(0, dim, layout=gl.SliceLayout(1, layout))
    k = gl.arange(0, dim // 2, layout=gl.SliceLayout(0, layout))
    at += row[:, None] * dim + k[None, :]
    return gl.load(at), gl.load(at + dim // 2)


@gluon.jit
def _times(weights, lows, first: gl.constexpr, dim: gl.constexpr, layout: gl.constexpr):
    """Weights times a row of 16-bit numbers, that from half ``first`` of ``lows`` on: two chains of products, whose
    eight columns are the same."""
    given: gl.constexpr = gl.DotOperandLayout(1, layout, 8)
    one, other = weights
    low = lows.index(first).load(gl.SliceLayout(1, given))[:, None]
    low, _ = gl.broadcast(low, gl.zeros([dim // 2, 8], low.dtype, given))
    total = mma_v2(one, low, gl.zeros([dim, 8], gl.float32, layout))
    low = lows.index(first + 1).load(gl.SliceLayout(1, given))[:, None]
    low, _ = gl.broadcast(low, gl.zeros([dim // 2, 8], low.dtype, given))
    return gl.max(total + mma_v2(other, low, gl.zeros([dim, 8], gl.float32, layout)), axis=1)


@gluon.jit
def _past(ring, weights, place, position, sizes, taps: gl.constexpr, length: gl.constexpr, layout: gl.constexpr):
    """What a convolution adds up of earlier tokens, fp32, oldest first, and the weights of the newest."""
    width, weight_channel, weight_tap = sizes
    weights += place * weight_channel
    total = gl.zeros(place.shape, gl.float32, layout)
    for tap in gl.static_range(taps - 1):
        wanted = position - (taps - 1) + tap
        past = gl.load(ring + wanted % length * width + place, mask=(place >= 0) & (wanted >= 0), other=0.0)
        total += past.to(gl.float32) * gl.load(weights + tap * weight_tap)
    return total, gl.load(weights + (taps - 1) * weight_tap)


@gluon.jit
def single(
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
    heads,
    l2_eps,
    versions: gl.constexpr,
    dim: gl.constexpr,
    taps: gl.constexpr,
    length: gl.constexpr,
    bounded: gl.constexpr,
    parts: gl.constexpr,
    releases: gl.constexpr,
):
    """As ``triton_decode``'s kernels, for ``dim`` 128 and up to four taps, in clusters of ``parts`` programs (1 or 2)
    of eight warps. ``expand`` [2, heads * dim, dim] in the dtype of ``projected``, whose rows begin at multiples of 16
    bytes. Before ``gdc_wait`` it reads weights and what stands before the kernel in front of this one begins: slots,
    positions, rings and states. ``releases``: as in ``triton_advance``."""
    warps: gl.constexpr = 8
    deep: gl.constexpr = dim // (parts * warps)
    by_row: gl.constexpr = _blocked([deep, 4], [parts, 32 // parts], [warps, 1], [1, 0], 1, parts)
    of_rows: gl.constexpr = gl.SliceLayout(1, by_row)
    of_columns: gl.constexpr = gl.SliceLayout(0, by_row)
    by_kind: gl.constexpr = _blocked([1, 1], [1, 32], [2, warps // 2], [1, 0], -1, parts)
    by_one: gl.constexpr = _blocked([1], [32], [warps], [0], 0, parts)
    by_sum: gl.constexpr = _blocked([4, 2], [32, 1], [warps, 1], [1, 0], 0, parts)
    by_eight: gl.constexpr = _blocked([8], [32], [warps], [0], -1, parts)
    by_channel: gl.constexpr = _blocked([4], [32], [warps], [0], -1, parts)
    whole: gl.constexpr = _product(warps, -1, parts)
    shared: gl.constexpr = _product(warps, 0, parts)
    of_whole: gl.constexpr = gl.SliceLayout(1, whole)
    line: gl.constexpr = _shared([0], -1, parts)
    line_shared: gl.constexpr = _shared([0], 0, parts)

    if parts > 1:
        meeting = _exchange(GREET, "=r,~{memory}", [])
    h = gl.program_id(0)
    t = gl.program_id(1).to(gl.int64)
    position = gl.load(start + t).to(gl.int32)
    slot = gl.load(slots + t).to(gl.int64)

    # what stands before the step: weights of the gates, then rings and weights of the convolution
    weights = expand + h * (dim * dim)
    forget_weights = _weights(weights, dim, gl.DotOperandLayout(0, whole, 8))
    gate_weights = _weights(weights + heads * (dim * dim), dim, gl.DotOperandLayout(0, shared, 8))
    gl.thread_barrier()  # or they are sent for when slot and position are there

    width = heads * dim
    first = conv_state + slot * (length * 3 * width)
    kind = gl.arange(0, 2, layout=gl.SliceLayout(1, by_kind))  # query and key
    place = kind[:, None] * width + h * dim + gl.arange(0, dim, layout=gl.SliceLayout(0, by_kind))[None, :]
    column = gl.arange(0, dim, layout=of_columns)
    value_place = 2 * width + h * dim + gl.arange(0, dim, layout=by_one)
    sizes = (3 * width, weight_channel, weight_tap)
    before, newest = _past(first, conv_weight, place, position, sizes, taps, length, by_kind)
    value_before, value_newest = _past(first, conv_weight, value_place, position, sizes, taps, length, by_one)
    rate = gl.exp(gl.load(a_log + h))
    forget_channel = gl.arange(0, dim, layout=of_whole)
    bias = gl.load(dt_bias + h * dim + forget_channel)
    normal = gl.load(norm_weight + column).to(gl.float32)

    k_row = gl.arange(0, dim, layout=of_rows)
    known = (k_row < gl.where(position > 0, dim, 0))[:, None]  # a fresh sequence starts from zeros
    old = state + ((slot * versions + position % versions) * heads + h) * (dim * dim)
    new = state + ((slot * versions + (position + 1) % versions) * heads + h) * (dim * dim)
    square = k_row[:, None] * dim + column[None, :]
    memory = gl.load(old + square, mask=known, other=0.0)

    if parts > 1:
        meeting = _exchange(MEET, "=r,r,~{memory}", [meeting])
    gdc_wait()
    given = projected + t * projected_row
    low = given + 3 * width
    lows = gl.allocate_shared_memory(projected.dtype.element_ty, [2 * dim], line)
    # not to registers, or ptxas sends for some of it when it has multiplied the rest
    async_copy.async_copy_global_to_shared(lows, low + gl.arange(0, 2 * dim, layout=by_eight))
    async_copy.commit_group()
    own = gl.load(given + place)
    value_own = gl.load(given + value_place)
    beta = gl.load(low + 2 * dim + h).to(gl.float32)
    async_copy.wait_group(0)
    halves = lows._reinterpret(projected.dtype.element_ty, [4, dim // 2], line)

    forget = _times(forget_weights, halves, 0, dim, whole) + bias
    gate = _sigmoid(_times(gate_weights, halves, 2, dim, shared))
    if bounded:
        decay = lower_bound * _sigmoid(rate * forget)
    else:
        soft = _log2(1.0 + gl.exp(gl.minimum(forget, 20.0))) * 0.6931471805599453
        decay = -rate * gl.where(forget > 20.0, forget, soft)
    # all at once, lest some share memory and barriers come between
    of_warps = gl.allocate_shared_memory(gl.float32, [warps, dim, 2], _shared([2, 1, 0], 1, parts))
    of_all = gl.allocate_shared_memory(gl.float32, [dim, 2], _shared([1, 0], 0, parts))
    channel_kept = gl.allocate_shared_memory(gl.float32, [dim], line)
    column_gate = gl.allocate_shared_memory(gl.float32, [dim], line_shared)
    channel_kept.store(gl.exp(decay))
    column_gate.store(gate)

    # queries and keys as they are, and their lengths where both are used: no warp waits for them before
    mixed = before + own.to(gl.float32) * newest
    convolved = gl.allocate_shared_memory(gl.float32, [2 * dim], line)
    convolved.store(gl.reshape(mixed * _sigmoid(mixed), [2 * dim]))
    kinds = convolved._reinterpret(gl.float32, [2, dim], line)
    beta = _sigmoid(beta)
    value = value_before + value_own.to(gl.float32) * value_newest
    # through shared memory, so that of all threads that have it only one counts: the one that writes the ring
    column_value = gl.allocate_shared_memory(gl.float32, [dim], line_shared)
    column_value.store(value * _sigmoid(value))

    query = kinds.index(0).load(of_rows)
    key = kinds.index(1).load(of_rows)
    queries = kinds.index(0).load(by_channel)
    keys = kinds.index(1).load(by_channel)
    of_query = gl.rsqrt(gl.sum(queries * queries, axis=0) + l2_eps)
    of_key = gl.rsqrt(gl.sum(keys * keys, axis=0) + l2_eps)
    kq = gl.sum(keys * queries, axis=0) * of_key
    kept = channel_kept.load(of_rows)
    gate_here = column_gate.load(of_columns)
    left = memory * kept[:, None]
    recalls = gl.sum(gl.reshape(left * key[:, None], [warps, dim // warps, dim]), axis=1)
    sees = gl.sum(gl.reshape(left * query[:, None], [warps, dim // warps, dim]), axis=1)
    of_warps.store(gl.join(recalls, sees))
    of_all.store(gl.sum(of_warps.load(_blocked([warps, 1, 1], [1, 16, 2], [1, warps, 1], [2, 1, 0], 1, parts)), axis=0))
    sums = of_all.load(by_sum)
    which = gl.arange(0, 2, layout=gl.SliceLayout(0, by_sum))[None, :]
    recalled = gl.convert_layout(gl.sum(gl.where(which == 0, sums, 0.0), axis=1), of_columns, assert_trivial=True)
    seen = gl.convert_layout(gl.sum(gl.where(which == 1, sums, 0.0), axis=1), of_columns, assert_trivial=True)
    error = (column_value.load(of_columns) - recalled * of_key) * beta
    read = gl.reshape((seen + kq * error) * (of_query * dim**-0.5), [parts, dim // parts])
    squares = gl.sum(read * read, axis=1)
    if parts > 1:
        meeting = _exchange(GIVE, "=r,r,f,~{memory}", [meeting, squares])
    gl.store(new + square, left + key[:, None] * (error * of_key)[None, :])
    if releases:
        gdc_launch_dependents()
    if parts > 1:
        squares = _taken(TAKE, meeting)
    # the row written may be the oldest one read, by the same thread, and in all programs before they sent their number
    gl.store(first + position % length * (3 * width) + place, own)
    gl.store(first + position % length * (3 * width) + value_place, value_own)
    inverse = gl.rsqrt(squares / dim + norm_eps)
    scaled = gl.convert_layout(gl.reshape(read * inverse[:, None], [dim]), of_columns, assert_trivial=True)
    normed = scaled * normal * gate_here
    gl.store(out + t * width + h * dim + column, normed.to(out.dtype.element_ty))
