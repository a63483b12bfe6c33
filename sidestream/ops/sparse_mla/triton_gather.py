"""The gathering role of ``triton_roles``: pool rows to shared memory, unpacked on the way (Gluon, Hopper only)."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

_UNPACK = gl.constexpr(
    """{
    .reg .b16 a, b, c, d;
    .reg .b32 x, y;
    .reg .f32 e, f, g, h;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 x, a;
    cvt.rn.f16x2.e4m3x2 y, b;
    mov.b32 {a, b}, x;
    mov.b32 {c, d}, y;
    cvt.f32.f16 e, a;
    cvt.f32.f16 f, b;
    cvt.f32.f16 g, c;
    cvt.f32.f16 h, d;
    mul.f32 e, e, $3;
    mul.f32 f, f, $3;
    mul.f32 g, g, $3;
    mul.f32 h, h, $3;
    cvt.rn.bf16x2.f32 $0, f, e;
    cvt.rn.bf16x2.f32 $1, h, g;
    }"""
)
"""Four E4M3 values of one word, times one scale, as two pairs of bf16."""

_UNPACK_PAIRS = gl.constexpr(
    """{
    .reg .b16 a, b, c, d;
    .reg .b32 x, y;
    .reg .f32 e, f, g, h;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 x, a;
    cvt.rn.f16x2.e4m3x2 y, b;
    mov.b32 {a, b}, x;
    mov.b32 {c, d}, y;
    cvt.f32.f16 e, a;
    cvt.f32.f16 f, b;
    cvt.f32.f16 g, c;
    cvt.f32.f16 h, d;
    cvt.rn.bf16x2.f32 x, f, e;
    cvt.rn.bf16x2.f32 y, h, g;
    mul.rn.bf16x2 $0, x, $3;
    mul.rn.bf16x2 $1, y, $3;
    }"""
)
"""The same with a power of two, twice in bf16, as scale: E4M3 fits in bf16, so there is one rounding here, too."""

_UNPACK_SHIFTED = gl.constexpr(
    """{
    .reg .b32 x, y;
    prmt.b32 x, $2, 0, 0x9180;
    prmt.b32 y, $2, 0, 0xb3a2;
    shl.b32 x, x, 4;
    shl.b32 y, y, 4;
    and.b32 x, x, 0x87f087f0;
    and.b32 y, y, 0x87f087f0;
    mul.rn.bf16x2 $0, x, $3;
    mul.rn.bf16x2 $1, y, $3;
    }"""
)
"""The same without conversions: a byte behind eight copies of its sign, four bits further up, is its value in bf16 but
for 2**-120, which the scale makes up for. NaN becomes 480, which whoever packs rows gives scales of NaN alone."""

# Eight neighbouring lanes hold 64 columns of two rows: stores to swizzled shared memory meet no bank twice.
SHORT_TILES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 8, 0], [2, 0, 0]],
        [[0, 0, 4], [0, 1, 0], [1, 0, 0], [0, 2, 0], [0, 4, 0]],
        [[4, 0, 0], [8, 0, 0]],
        [],
        [16, 16, 8],
    )
)
LONG_TILES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 2, 0], [2, 0, 0]],
        [[0, 0, 4], [0, 0, 8], [1, 0, 0], [0, 0, 16], [0, 1, 0]],
        [[4, 0, 0], [8, 0, 0]],
        [],
        [16, 4, 32],
    )
)
"""Words of 16 rows of 512 values by tiles of 32 and of 128."""


@gluon.jit
def pool_rows(own_rows, position, end, block_size, paged: gl.constexpr):
    """Pool rows int32 of places, 0 from ``end`` on: a pool has fewer than 2**31 rows, and registers are scarce."""
    seen = position < end
    if paged:
        block = gl.load(own_rows + position // block_size, mask=seen, other=0).to(gl.int32)
        return (block * block_size + position % block_size).to(gl.int32)
    else:
        return gl.load(own_rows + position, mask=seen, other=0).to(gl.int32)


@gluon.jit
def copy_rows(target, pool, row, seen, column, elems: gl.constexpr):
    """Start copying columns of pool rows to shared memory; rows not ``seen`` become zeros without being read."""
    source = pool + row.to(gl.int64)[:, None] * elems + column[None, :]
    async_copy.async_copy_global_to_shared(target, source, mask=seen[:, None])


@gluon.jit
def gather_plain(pool, memory, barriers, span, kinds):
    """Copy tiles of 64 bf16 rows; each of the 128 threads arrives at ``full`` when its own copies have."""
    values, _, ropes, own_rows, block_size = pool
    keys, rope_keys, _, _ = memory
    full, empty = barriers
    begin, end = span
    latent, rope, row_elems, rope_elems, _, _, paged, _, _ = kinds
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    by_short_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    place = gl.arange(0, 64, layout=gl.SliceLayout(1, by_row))
    column = gl.arange(0, latent, layout=gl.SliceLayout(0, by_row))
    row = pool_rows(own_rows, begin + place, end, block_size, paged)
    if rope > 0:
        short_place = gl.arange(0, 64, layout=gl.SliceLayout(1, by_short_row))
        rope_column = rope_elems - rope + gl.arange(0, rope, layout=gl.SliceLayout(0, by_short_row))
        short_row = pool_rows(own_rows, begin + short_place, end, block_size, paged)
    for start in range(begin, end, 64):
        done = (start - begin) // 64
        buffer = done % 2
        mbarrier.wait(empty.index(buffer), ((done // 2) & 1) ^ 1)
        copy_rows(keys.index(buffer), values, row, start + place < end, column, row_elems)
        row = pool_rows(own_rows, start + 64 + place, end, block_size, paged)
        if rope > 0:
            copy_rows(rope_keys.index(buffer), ropes, short_row, start + short_place < end, rope_column, rope_elems)
            short_row = pool_rows(own_rows, start + 64 + short_place, end, block_size, paged)
        async_copy.mbarrier_arrive(full.index(buffer), increment_count=False)


@gluon.jit
def gather_plain_halves(pool, memory, barriers, span, kinds):
    """``gather_plain`` for tiles of 32 rows. Row numbers of two tiles are read at a time and lie in shared memory, so
    that the first four tiles are on their way after one trip."""
    values, _, ropes, own_rows, block_size = pool
    keys, rope_keys, near, _ = memory
    full, empty = barriers
    begin, end = span
    latent, rope, row_elems, rope_elems, _, _, paged, _, _ = kinds
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    by_short_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    of_row: gl.constexpr = gl.SliceLayout(1, by_row)
    of_short_row: gl.constexpr = gl.SliceLayout(1, by_short_row)
    place = gl.arange(0, 32, layout=of_row)
    column = gl.arange(0, latent, layout=gl.SliceLayout(0, by_row))
    line = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    near.index(0).store(pool_rows(own_rows, begin + line, end, block_size, paged))
    near.index(1).store(pool_rows(own_rows, begin + 64 + line, end, block_size, paged))
    row = pool_rows(own_rows, begin + 128 + line, end, block_size, paged)
    if rope > 0:
        short_place = gl.arange(0, 32, layout=of_short_row)
        rope_column = rope_elems - rope + gl.arange(0, rope, layout=gl.SliceLayout(0, by_short_row))
    gl.thread_barrier()
    for start in range(begin, end, 64):
        done = (start - begin) // 64
        turn = done % 2
        phase = ((done // 2) & 1) ^ 1
        first = 2 * turn
        here = near.index(turn)
        row_a, row_b = here.slice(0, 32).load(of_row), here.slice(32, 32).load(of_row)
        if rope > 0:
            short_a, short_b = here.slice(0, 32).load(of_short_row), here.slice(32, 32).load(of_short_row)
        gl.thread_barrier()
        here.store(row)
        mbarrier.wait(empty.index(first), phase)
        copy_rows(keys.index(first), values, row_a, start + place < end, column, row_elems)
        if rope > 0:
            seen = start + short_place < end
            copy_rows(rope_keys.index(first), ropes, short_a, seen, rope_column, rope_elems)
        async_copy.mbarrier_arrive(full.index(first), increment_count=False)
        row = pool_rows(own_rows, start + 192 + line, end, block_size, paged)
        if start + 32 < end:
            mbarrier.wait(empty.index(first + 1), phase)
            copy_rows(keys.index(first + 1), values, row_b, start + 32 + place < end, column, row_elems)
            if rope > 0:
                seen = start + 32 + short_place < end
                copy_rows(rope_keys.index(first + 1), ropes, short_b, seen, rope_column, rope_elems)
            async_copy.mbarrier_arrive(full.index(first + 1), increment_count=False)


@gluon.jit
def _load_rows(words, scales, row, seen, columns, sizes, by_word: gl.constexpr):
    """16 rows: words int32 [16, tiles, words a tile] of E4M3 values and scales [16, tiles]; zeros where not seen."""
    word_column, scale_column = columns
    row_words, scale_elems = sizes
    at = row.to(gl.int64)
    scale = gl.load(scales + at[:, None] * scale_elems + scale_column[None, :], mask=seen[:, None], other=0)
    far = gl.convert_layout(at[:, None], gl.SliceLayout(2, by_word), assert_trivial=True)[:, :, None] * row_words
    mask = gl.convert_layout(seen[:, None], gl.SliceLayout(2, by_word), assert_trivial=True)[:, :, None]
    return gl.load(words + far + word_column, mask=mask, other=0), scale


@gluon.jit
def factors(scale, mx: gl.constexpr, unpacking: gl.constexpr):
    """What multiplies values: scales fp32 as they are, those of ``mxfp8`` (bytes) twice in bf16, as int32; if values
    are shifted times 2**60, so that keys come out 2**-60 times as large: neither those beyond 2**75 nor the bits of
    those below 2**-66 would fit otherwise."""
    if mx and unpacking == 3:
        bits = scale.to(gl.int32)
        return gl.where(bits == 255, 0x7FC07FC0, (gl.where(bits < 195, bits, 195) + 60) * 0x00800080)
    elif mx:
        bits = scale.to(gl.int32)
        return gl.where(bits == 255, 0x7FC07FC0, bits * 0x00800080)
    else:
        return scale


@gluon.jit
def unpack(raw, scale, mx: gl.constexpr, unpacking: gl.constexpr):
    """int32 [16, 256], pairs of bf16, of words of four E4M3 values and their scales: bytes or fp32, ``factors`` where
    those were staged."""
    pairs: gl.constexpr = mx and unpacking > 0
    if pairs:
        factor = scale if unpacking >= 2 else factors(scale, mx, unpacking)
    elif mx:
        bits = scale.to(gl.int32)
        factor = gl.where(bits == 255, 0x7FC00000, bits << 23).to(gl.float32, bitcast=True)
    else:
        factor = scale
    wide, _ = gl.broadcast(factor[:, :, None], raw)
    kinds: gl.constexpr = (gl.int32, gl.int32)
    text: gl.constexpr = (_UNPACK_SHIFTED if unpacking == 3 else _UNPACK_PAIRS) if pairs else _UNPACK
    low, high = gl.inline_asm_elementwise(text, "=r,=r,r,r", [raw, wide], kinds, is_pure=True, pack=1)
    return gl.reshape(gl.join(low, high), [16, 256])


@gluon.jit
def gather_quantised(pool, memory, barriers, span, kinds):
    """Unpack tiles of E4M3 rows to bf16. A whole tile is on its way in registers while the one before is unpacked; the
    barriers between quarters keep the compiler from having more there."""
    words, scales, ropes, own_rows, block_size = pool
    keys, rope_keys, near, _ = memory
    full, empty = barriers
    begin, end = span
    latent, rope, row_elems, rope_elems, tile, mx, paged, block_n, unpacking = kinds
    halves: gl.constexpr = block_n == 32
    by_word: gl.constexpr = SHORT_TILES if tile == 32 else LONG_TILES
    pairs: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    by_short_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    by_scale: gl.constexpr = gl.SliceLayout(2, by_word)
    by_place: gl.constexpr = gl.SliceLayout(1, by_scale)
    by_tile: gl.constexpr = gl.SliceLayout(0, by_word)
    count: gl.constexpr = latent // tile
    scale_elems: gl.constexpr = row_elems if mx else row_elems // 4
    sizes: gl.constexpr = (row_elems // 4, scale_elems)
    place = gl.arange(0, 16, layout=by_place)
    scale_first: gl.constexpr = latent if mx else latent // 4
    scale_column = scale_first + gl.arange(0, count, layout=gl.SliceLayout(0, by_scale))
    tile_of = gl.arange(0, count, layout=gl.SliceLayout(1, by_tile)) * (tile // 4)
    word_of = gl.arange(0, tile // 4, layout=gl.SliceLayout(0, by_tile))
    columns = ((tile_of[:, None] + word_of[None, :])[None, :, :], scale_column)
    # Row numbers pass through shared memory, since the values take the registers.
    line = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    near.index(0).store(pool_rows(own_rows, begin + line, end, block_size, paged))
    near.index(1).store(pool_rows(own_rows, begin + 64 + line, end, block_size, paged))
    row = pool_rows(own_rows, begin + 128 + line, end, block_size, paged)
    if rope > 0:
        short_place = gl.arange(0, block_n, layout=gl.SliceLayout(1, by_short_row))
        rope_column = rope_elems - rope + gl.arange(0, rope, layout=gl.SliceLayout(0, by_short_row))
    gl.thread_barrier()
    at = begin + place
    here = near.index(0)
    raw_a, scale_a = _load_rows(words, scales, here.slice(0, 16).load(by_place), at < end, columns, sizes, by_word)
    raw_b, scale_b = _load_rows(
        words, scales, here.slice(16, 16).load(by_place), at + 16 < end, columns, sizes, by_word
    )
    raw_c, scale_c = _load_rows(
        words, scales, here.slice(32, 16).load(by_place), at + 32 < end, columns, sizes, by_word
    )
    raw_d, scale_d = _load_rows(
        words, scales, here.slice(48, 16).load(by_place), at + 48 < end, columns, sizes, by_word
    )
    for start in range(begin, end, 64):
        done = (start - begin) // 64
        turn = done % 2
        phase = ((done // 2) & 1) ^ 1
        first = 2 * turn if halves else turn
        mbarrier.wait(empty.index(first), phase)
        key = keys.index(first)._reinterpret(gl.int32, [block_n, latent // 2], pairs)
        if rope > 0:
            near_rope = near.index(turn).slice(0, block_n)
            short_row = near_rope.load(gl.SliceLayout(1, by_short_row))
            copy_rows(rope_keys.index(first), ropes, short_row, start + short_place < end, rope_column, rope_elems)
            if halves:
                async_copy.mbarrier_arrive(full.index(first), increment_count=False)
                short_row = near.index(turn).slice(32, 32).load(gl.SliceLayout(1, by_short_row))
            else:
                async_copy.commit_group()
        at += 64
        here = near.index(1 - turn)
        key.slice(0, 16).store(unpack(raw_a, scale_a, mx, unpacking))
        gl.thread_barrier()
        near.index(turn).store(row)
        row = pool_rows(own_rows, start + 192 + line, end, block_size, paged)
        raw_a, scale_a = _load_rows(words, scales, here.slice(0, 16).load(by_place), at < end, columns, sizes, by_word)
        key.slice(16, 16).store(unpack(raw_b, scale_b, mx, unpacking))
        if halves:
            fence_async_shared()
        gl.thread_barrier()
        raw_b, scale_b = _load_rows(
            words, scales, here.slice(16, 16).load(by_place), at + 16 < end, columns, sizes, by_word
        )
        if halves:
            mbarrier.arrive(full.index(first), count=1)
            if start + 32 < end:
                mbarrier.wait(empty.index(first + 1), phase)
                if rope > 0:
                    seen = start + 32 + short_place < end
                    copy_rows(rope_keys.index(first + 1), ropes, short_row, seen, rope_column, rope_elems)
                    async_copy.mbarrier_arrive(full.index(first + 1), increment_count=False)
                next_key = keys.index(first + 1)._reinterpret(gl.int32, [block_n, latent // 2], pairs)
                next_key.slice(0, 16).store(unpack(raw_c, scale_c, mx, unpacking))
                next_key.slice(16, 16).store(unpack(raw_d, scale_d, mx, unpacking))
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(full.index(first + 1), count=1)
        else:
            key.slice(32, 16).store(unpack(raw_c, scale_c, mx, unpacking))
            gl.thread_barrier()
        raw_c, scale_c = _load_rows(
            words, scales, here.slice(32, 16).load(by_place), at + 32 < end, columns, sizes, by_word
        )
        if not halves:
            key.slice(48, 16).store(unpack(raw_d, scale_d, mx, unpacking))
            gl.thread_barrier()
        raw_d, scale_d = _load_rows(
            words, scales, here.slice(48, 16).load(by_place), at + 48 < end, columns, sizes, by_word
        )
        if not halves:
            if rope > 0:
                async_copy.wait_group(0)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(full.index(first), count=1)
