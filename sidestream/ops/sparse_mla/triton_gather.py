"""The gathering role of ``triton_roles`` for bf16 rows, and what gathering has in common (Gluon, Hopper only)."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier


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
def read_ahead(near, own_rows, span, block_size, paged: gl.constexpr):
    """Row numbers of the first two times 64 rows to shared memory, behind which a barrier is wanted: places of 64 rows,
    and the numbers of the 64 after those. Numbers pass through there where the rows themselves take the registers."""
    begin, end = span
    line = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    near.index(0).store(pool_rows(own_rows, begin + line, end, block_size, paged))
    near.index(1).store(pool_rows(own_rows, begin + 64 + line, end, block_size, paged))
    return line, pool_rows(own_rows, begin + 128 + line, end, block_size, paged)


@gluon.jit
def gather_plain(pool, memory, barriers, span, kinds):
    """Copy tiles of 64 bf16 rows; each of the 128 threads arrives at ``full`` when its own copies have."""
    values, _, ropes, own_rows, block_size = pool
    keys, rope_keys, _, _ = memory
    full, empty = barriers
    begin, end = span
    latent, rope, row_elems, rope_elems, _, _, paged, _ = kinds
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
    latent, rope, row_elems, rope_elems, _, _, paged, _ = kinds
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    by_short_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    of_row: gl.constexpr = gl.SliceLayout(1, by_row)
    of_short_row: gl.constexpr = gl.SliceLayout(1, by_short_row)
    place = gl.arange(0, 32, layout=of_row)
    column = gl.arange(0, latent, layout=gl.SliceLayout(0, by_row))
    line, row = read_ahead(near, own_rows, span, block_size, paged)
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
