"""The gathering role for quantised rows with their scales by way of shared memory (Gluon, Hopper only)."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from sidestream.ops.sparse_mla.triton_gather import LONG_TILES, SHORT_TILES, copy_rows, factors, pool_rows, unpack


@gluon.jit
def _load_staged(words, row, seen, word_column, row_words: gl.constexpr, by_word: gl.constexpr):
    """Words of ``_load_rows`` alone."""
    far = gl.convert_layout(row.to(gl.int64)[:, None], gl.SliceLayout(2, by_word), assert_trivial=True)[:, :, None]
    mask = gl.convert_layout(seen[:, None], gl.SliceLayout(2, by_word), assert_trivial=True)[:, :, None]
    return gl.load(words + far * row_words + word_column, mask=mask, other=0)


@gluon.jit
def gather_staged(pool, memory, barriers, span, kinds):
    """``gather_quantised`` with scales by way of shared memory: one load a tile and thread, not sixteen, and registers
    for a tile's values alone."""
    words, scales, ropes, own_rows, block_size = pool
    keys, rope_keys, near, staged = memory
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
    by_staged: gl.constexpr = gl.BlockedLayout([1, count // 2], [16, 2], [4, 1], [1, 0])
    of_staged: gl.constexpr = gl.SliceLayout(1, by_staged)
    scale_elems: gl.constexpr = row_elems if mx else row_elems // 4
    row_words: gl.constexpr = row_elems // 4
    place = gl.arange(0, 16, layout=by_place)
    scale_place = gl.arange(0, 64, layout=of_staged)
    scale_first: gl.constexpr = latent if mx else latent // 4
    scale_column = (scale_first + gl.arange(0, count, layout=gl.SliceLayout(0, by_staged)))[None, :]
    tile_of = gl.arange(0, count, layout=gl.SliceLayout(1, by_tile)) * (tile // 4)
    word_of = gl.arange(0, tile // 4, layout=gl.SliceLayout(0, by_tile))
    column = (tile_of[:, None] + word_of[None, :])[None, :, :]
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
    far = here.load(of_staged).to(gl.int64)[:, None] * scale_elems + scale_column
    scale = gl.load(scales + far, mask=(begin + scale_place < end)[:, None], other=0)
    raw_a = _load_staged(words, here.slice(0, 16).load(by_place), at < end, column, row_words, by_word)
    raw_b = _load_staged(words, here.slice(16, 16).load(by_place), at + 16 < end, column, row_words, by_word)
    raw_c = _load_staged(words, here.slice(32, 16).load(by_place), at + 32 < end, column, row_words, by_word)
    raw_d = _load_staged(words, here.slice(48, 16).load(by_place), at + 48 < end, column, row_words, by_word)
    for start in range(begin, end, 64):
        done = (start - begin) // 64
        turn = done % 2
        phase = ((done // 2) & 1) ^ 1
        first = 2 * turn if halves else turn
        # Those of the last tile have been used, and a barrier stands behind that.
        staged.store(factors(scale, mx, unpacking))
        mbarrier.wait(empty.index(first), phase)
        key = keys.index(first)._reinterpret(gl.int32, [block_n, latent // 2], pairs)
        if rope > 0:
            near_rope = near.index(turn).slice(0, block_n)
            short_row = near_rope.load(gl.SliceLayout(1, by_short_row))
            copy_rows(rope_keys.index(first), ropes, short_row, start + short_place < end, rope_column, rope_elems)
            async_copy.mbarrier_arrive(full.index(first), increment_count=False)
            if halves:
                short_row = near.index(turn).slice(32, 32).load(gl.SliceLayout(1, by_short_row))
        at += 64
        here = near.index(1 - turn)
        gl.thread_barrier()
        far = here.load(of_staged).to(gl.int64)[:, None] * scale_elems + scale_column
        scale = gl.load(scales + far, mask=(start + 64 + scale_place < end)[:, None], other=0)
        key.slice(0, 16).store(unpack(raw_a, staged.slice(0, 16).load(by_scale), mx, unpacking))
        gl.thread_barrier()
        near.index(turn).store(row)
        row = pool_rows(own_rows, start + 192 + line, end, block_size, paged)
        raw_a = _load_staged(words, here.slice(0, 16).load(by_place), at < end, column, row_words, by_word)
        key.slice(16, 16).store(unpack(raw_b, staged.slice(16, 16).load(by_scale), mx, unpacking))
        if halves:
            fence_async_shared()
        gl.thread_barrier()
        if halves:
            mbarrier.arrive(full.index(first), count=1)
            if start + 32 < end:
                mbarrier.wait(empty.index(first + 1), phase)
                if rope > 0:
                    seen = start + 32 + short_place < end
                    copy_rows(rope_keys.index(first + 1), ropes, short_row, seen, rope_column, rope_elems)
                    async_copy.mbarrier_arrive(full.index(first + 1), increment_count=False)
                next_key = keys.index(first + 1)._reinterpret(gl.int32, [block_n, latent // 2], pairs)
                next_key.slice(0, 16).store(unpack(raw_c, staged.slice(32, 16).load(by_scale), mx, unpacking))
                next_key.slice(16, 16).store(unpack(raw_d, staged.slice(48, 16).load(by_scale), mx, unpacking))
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(full.index(first + 1), count=1)
        else:
            key.slice(32, 16).store(unpack(raw_c, staged.slice(32, 16).load(by_scale), mx, unpacking))
            key.slice(48, 16).store(unpack(raw_d, staged.slice(48, 16).load(by_scale), mx, unpacking))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(full.index(first), count=1)
        # Behind the fence, which waits for loads under way.
        raw_b = _load_staged(words, here.slice(16, 16).load(by_place), at + 16 < end, column, row_words, by_word)
        raw_c = _load_staged(words, here.slice(32, 16).load(by_place), at + 32 < end, column, row_words, by_word)
        raw_d = _load_staged(words, here.slice(48, 16).load(by_place), at + 48 < end, column, row_words, by_word)
