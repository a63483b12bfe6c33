"""The gathering role of ``triton_roles`` for E4M3 rows, unpacked to bf16 as each format wants (Gluon, Hopper only).

Rows are on their way while those before them are unpacked, in quarters of a tile: of ``mxfp8`` in shared memory, of
``fp8_ds_mla``, beside whose rope keys none is left, in registers. There, the compiler waits for all loads that last
beyond a turn of the loop as for one, the latest included, so the last half of a tile is sent for in the turn that
unpacks it; and barriers between quarters keep it from having more in registers.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from sidestream.ops.sparse_mla.triton_gather import copy_rows, pool_rows, read_ahead

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

# Eight neighbouring lanes hold 64 columns of two rows: stores to swizzled shared memory meet no bank twice.
_SHORT_TILES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 8, 0], [2, 0, 0]],
        [[0, 0, 4], [0, 1, 0], [1, 0, 0], [0, 2, 0], [0, 4, 0]],
        [[4, 0, 0], [8, 0, 0]],
        [],
        [16, 16, 8],
    )
)
_SHORT_STAGE = gl.constexpr(
    gl.SharedLinearLayout(
        [
            *([0, 0, 1], [0, 0, 2]),
            *([0, 0, 4], [0, 1, 0], [1, 0, 0], [0, 2, 0], [0, 4, 0]),
            *([4, 0, 0], [8, 0, 0]),
            *([0, 8, 0], [2, 0, 0]),
        ]
    )
)
"""Short tiles in shared memory, 16 bytes of each lane side by side: a thread reads what it sent for itself."""
_STAGES = gl.constexpr(3)
"""Quarters of a tile of ``mxfp8`` whose words find a place in shared memory beside all else."""
_LONG_TILES = gl.constexpr(
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
def _word_column(latent: gl.constexpr, tile: gl.constexpr, by_word: gl.constexpr):
    """Words of a row's values: [1, tiles, words a tile]."""
    by_tile: gl.constexpr = gl.SliceLayout(0, by_word)
    tile_of = gl.arange(0, latent // tile, layout=gl.SliceLayout(1, by_tile)) * (tile // 4)
    word_of = gl.arange(0, tile // 4, layout=gl.SliceLayout(0, by_tile))
    return (tile_of[:, None] + word_of[None, :])[None, :, :]


@gluon.jit
def _load_words(words, row, seen, column, row_words: gl.constexpr, by_word: gl.constexpr):
    """int32 [16, tiles, words a tile] of E4M3 values of 16 rows, zeros where not ``seen``."""
    far = gl.convert_layout(row.to(gl.int64)[:, None], gl.SliceLayout(2, by_word), assert_trivial=True)[:, :, None]
    mask = gl.convert_layout(seen[:, None], gl.SliceLayout(2, by_word), assert_trivial=True)[:, :, None]
    return gl.load(words + far * row_words + column, mask=mask, other=0)


@gluon.jit
def _unpack(raw, factor, text: gl.constexpr):
    """int32 [16, 256], pairs of bf16, of words of four E4M3 values and what ``text`` multiplies those of a tile by."""
    wide, _ = gl.broadcast(factor[:, :, None], raw)
    kinds: gl.constexpr = (gl.int32, gl.int32)
    low, high = gl.inline_asm_elementwise(text, "=r,=r,r,r", [raw, wide], kinds, is_pure=True, pack=1)
    return gl.reshape(gl.join(low, high), [16, 256])


@gluon.jit
def _unpack_mxfp8(raw, scale):
    """``_unpack`` with scales twice in bf16, as int32."""
    bits = scale.to(gl.int32)
    return _unpack(raw, gl.where(bits == 255, 0x7FC07FC0, bits * 0x00800080), _UNPACK_PAIRS)


@gluon.jit
def stages_mxfp8():
    """Shared memory for words of three quarters and scales of one tile, as ``gather_mxfp8`` wants it."""
    words = gl.allocate_shared_memory(gl.int32, [_STAGES, 16, 16, 8], _SHORT_STAGE)
    return words, gl.allocate_shared_memory(gl.uint8, [64, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _ask_words(source, held, near, part: gl.constexpr, start, end, row_words: gl.constexpr):
    """Send for words of the ``part``th quarter of the tile at ``start``, numbered in ``near``; zeros behind the end."""
    of_row: gl.constexpr = gl.SliceLayout(2, _SHORT_TILES)
    of_place: gl.constexpr = gl.SliceLayout(1, of_row)
    row = near.slice(part * 16, 16).load(of_place).to(gl.int64)[:, None]
    row = gl.convert_layout(row, of_row, assert_trivial=True)[:, :, None]
    seen = (start + part * 16 + gl.arange(0, 16, layout=of_place) < end)[:, None]
    seen = gl.convert_layout(seen, of_row, assert_trivial=True)[:, :, None]
    async_copy.async_copy_global_to_shared(held, source + row * row_words, mask=seen)


@gluon.jit
def _ask_scales(source, held, near, start, end, row_elems: gl.constexpr):
    """Send for the scales of the tile at ``start``, 16 bytes a row."""
    by_row: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0])
    of_row: gl.constexpr = gl.SliceLayout(1, by_row)
    row = near.load(of_row).to(gl.int64)[:, None] * row_elems
    seen = (start + gl.arange(0, 64, layout=of_row) < end)[:, None]
    async_copy.async_copy_global_to_shared(held, source + row, mask=seen)


@gluon.jit
def gather_mxfp8(pool, memory, barriers, span, kinds):
    """Tiles of 64 rows. Three quarters are on their way in shared memory while one is unpacked: copies are waited for
    by group, where all loads into registers that last beyond a turn of the loop are waited for as one."""
    words, scales, _, own_rows, block_size = pool
    keys, _, near, staged = memory
    full, empty = barriers
    begin, end = span
    latent, _, row_elems, _, tile, _, paged, block_n = kinds
    pairs: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    by_scale: gl.constexpr = gl.SliceLayout(2, _SHORT_TILES)
    by_byte: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0]))
    row_words: gl.constexpr = row_elems // 4
    word_source = words + gl.zeros([16, 1, 1], gl.int32, layout=_SHORT_TILES) + _word_column(latent, tile, _SHORT_TILES)
    scale_source = scales + (latent + gl.arange(0, 16, layout=by_byte))[None, :]
    held_words, held_scales = staged
    line, row = read_ahead(near, own_rows, span, block_size, paged)
    gl.thread_barrier()
    stage_a = 0
    stage_b = 1
    stage_c = 2
    _ask_scales(scale_source, held_scales, near.index(0), begin, end, row_elems)
    for i in gl.static_range(_STAGES):
        _ask_words(word_source, held_words.index(i), near.index(0), i, begin, end, row_words)
        async_copy.commit_group()
    for start in range(begin, end, 64):
        done = (start - begin) // 64
        turn = done % 2
        for i in gl.static_range(4):
            stage = stage_b if i == 1 else stage_c if i == 2 else stage_a
            async_copy.wait_group(_STAGES - 1)
            gl.thread_barrier()
            raw = held_words.index(stage).load(_SHORT_TILES)
            if i == 0:
                scale_a = held_scales.slice(0, 16).load(by_scale)
                scale_b = held_scales.slice(16, 16).load(by_scale)
                scale_c = held_scales.slice(32, 16).load(by_scale)
                scale_d = held_scales.slice(48, 16).load(by_scale)
                _ask_words(word_source, held_words.index(stage), near.index(turn), 3, start, end, row_words)
            else:
                there = near.index(1 - turn)
                if i == 1:  # all have read the scales of this tile
                    _ask_scales(scale_source, held_scales, there, start + 64, end, row_elems)
                _ask_words(word_source, held_words.index(stage), there, i - 1, start + 64, end, row_words)
            async_copy.commit_group()
            if i == 2:  # all have sent for the last quarter of this tile
                near.index(turn).store(row)
                row = pool_rows(own_rows, start + 192 + line, end, block_size, paged)
            if i == 0:
                mbarrier.wait(empty.index(turn), ((done // 2) & 1) ^ 1)
            key = keys.index(turn)._reinterpret(gl.int32, [block_n, latent // 2], pairs)
            scale = scale_a if i == 0 else scale_b if i == 1 else scale_c if i == 2 else scale_d
            key.slice(i * 16, 16).store(_unpack_mxfp8(raw, scale))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(turn), count=1)
        freed = stage_a
        stage_a = stage_b
        stage_b = stage_c
        stage_c = freed
    async_copy.wait_group(0)


@gluon.jit
def gather_fp8_ds_mla(pool, memory, barriers, span, kinds):
    """Tiles of 64 rows, scales of a tile by way of shared memory: one load a thread, not sixteen, and registers for
    values alone. Rope keys are copied, for which each of the 128 threads arrives at ``full``."""
    words, scales, ropes, own_rows, block_size = pool
    keys, rope_keys, near, staged = memory
    full, empty = barriers
    begin, end = span
    latent, rope, row_elems, rope_elems, tile, _, paged, block_n = kinds
    pairs: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    by_short_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    of_short_row: gl.constexpr = gl.SliceLayout(1, by_short_row)
    by_scale: gl.constexpr = gl.SliceLayout(2, _LONG_TILES)
    by_place: gl.constexpr = gl.SliceLayout(1, by_scale)
    by_staged: gl.constexpr = gl.BlockedLayout([1, latent // tile // 2], [16, 2], [4, 1], [1, 0])
    of_staged: gl.constexpr = gl.SliceLayout(1, by_staged)
    row_words: gl.constexpr = row_elems // 4
    place = gl.arange(0, 16, layout=by_place)
    scale_place = gl.arange(0, 64, layout=of_staged)
    scale_column = (latent // 4 + gl.arange(0, latent // tile, layout=gl.SliceLayout(0, by_staged)))[None, :]
    column = _word_column(latent, tile, _LONG_TILES)
    line, row = read_ahead(near, own_rows, span, block_size, paged)
    if rope > 0:
        short_place = gl.arange(0, 64, layout=of_short_row)
        rope_column = rope_elems - rope + gl.arange(0, rope, layout=gl.SliceLayout(0, by_short_row))
    gl.thread_barrier()
    at = begin + place
    here = near.index(0)
    far = here.load(of_staged).to(gl.int64)[:, None] * row_words + scale_column
    scale = gl.load(scales + far, mask=(begin + scale_place < end)[:, None], other=0)
    raw_a = _load_words(words, here.slice(0, 16).load(by_place), at < end, column, row_words, _LONG_TILES)
    raw_b = _load_words(words, here.slice(16, 16).load(by_place), at + 16 < end, column, row_words, _LONG_TILES)
    for start in range(begin, end, 64):
        done = (start - begin) // 64
        turn = done % 2
        # Those of the last tile have been used, and a barrier stands behind that.
        staged.store(scale)
        mbarrier.wait(empty.index(turn), ((done // 2) & 1) ^ 1)
        key = keys.index(turn)._reinterpret(gl.int32, [block_n, latent // 2], pairs)
        if rope > 0:
            short_row = near.index(turn).load(of_short_row)
            copy_rows(rope_keys.index(turn), ropes, short_row, start + short_place < end, rope_column, rope_elems)
            async_copy.mbarrier_arrive(full.index(turn), increment_count=False)
        here = near.index(turn)
        raw_c = _load_words(words, here.slice(32, 16).load(by_place), at + 32 < end, column, row_words, _LONG_TILES)
        raw_d = _load_words(words, here.slice(48, 16).load(by_place), at + 48 < end, column, row_words, _LONG_TILES)
        at += 64
        here = near.index(1 - turn)
        gl.thread_barrier()
        far = here.load(of_staged).to(gl.int64)[:, None] * row_words + scale_column
        scale = gl.load(scales + far, mask=(start + 64 + scale_place < end)[:, None], other=0)
        key.slice(0, 16).store(_unpack(raw_a, staged.slice(0, 16).load(by_scale), _UNPACK))
        gl.thread_barrier()
        near.index(turn).store(row)
        row = pool_rows(own_rows, start + 192 + line, end, block_size, paged)
        raw_a = _load_words(words, here.slice(0, 16).load(by_place), at < end, column, row_words, _LONG_TILES)
        key.slice(16, 16).store(_unpack(raw_b, staged.slice(16, 16).load(by_scale), _UNPACK))
        gl.thread_barrier()
        raw_b = _load_words(words, here.slice(16, 16).load(by_place), at + 16 < end, column, row_words, _LONG_TILES)
        key.slice(32, 16).store(_unpack(raw_c, staged.slice(32, 16).load(by_scale), _UNPACK))
        key.slice(48, 16).store(_unpack(raw_d, staged.slice(48, 16).load(by_scale), _UNPACK))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(turn), count=1)
