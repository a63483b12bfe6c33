"""The feeding role of ``triton_expert_roles``: rows and weights of each depth to shared memory (Gluon, Hopper only).

All programs go down the depth at about the same time, so whoever reads weights first waits for memory, and those who
read the same with it. A program may ask the L2 cache for a part of what the next tile needs: of the blocks that take
the same weights, each a quarter of these; of the parts of a block, each some of its rows.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

_ASK = gl.constexpr(
    """{
    .reg .pred p;
    setp.ne.s32 p, $2, 0;
    @p cp.async.bulk.prefetch.L2.global [$1], 512;
    mov.u32 $0, 0;
    }"""
)
ASKED = gl.constexpr(256)
"""Columns that are asked for at once: 512 bytes."""


@gluon.jit
def ask_expert(block, plan):
    """Begin to load a block's expert. Asked a tile ahead, since the tensor cores would wait for memory otherwise."""
    _, block_expert, _, routed_blocks, _, _, _ = plan
    return gl.load(block_expert + block, mask=block < routed_blocks, other=0)


@gluon.jit
def expert_of(asked, block, plan):
    """-1: the block is not needed."""
    _, _, _, routed_blocks, shared_blocks, num_experts, _ = plan
    return gl.where(block < routed_blocks, asked, num_experts + (block - routed_blocks) // shared_blocks)


@gluon.jit
def _weight_rows(expert, part, parts: gl.constexpr, gated: gl.constexpr):
    """First rows of a tile's two halves: gate and up, or neighbours."""
    if gated:
        first = expert * (2 * parts * 128) + part * 128
        second = first + parts * 128
    else:
        first = (expert * parts + part) * 256
        second = first + 128
    return first, second


@gluon.jit
def _asked(tile, asked, sources, plan, kinds):
    """What this program asks for of a tile, by [128] threads, those of even numbers rows of weights: where the first
    columns lie, less those until the thread's turn in each ``ASKED``, and when that is, -1 for never. By turns, since
    instructions that ask go one by one."""
    _, memory, row_stride, _, weight_memory = sources
    order, _, tokens, routed_blocks, shared_blocks, _, blocks = plan
    parts, depth, _, gated, top_k = kinds
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    block = tile // parts
    part = tile % parts
    expert = expert_of(asked, block, plan)
    first, second = _weight_rows(expert, part, parts, gated)
    place = lane // 2
    when = place % 4 * 64
    of_weights = block % 4 * 64 + place
    of_weights = gl.where(of_weights < 128, first + of_weights, second + of_weights - 128)
    member = part + place * parts
    slot = block * 128 + member
    is_weight = lane % 2 == 0
    in_block = (lane % 2 == 1) & (member < 128)
    if gated:
        pair = gl.load(order + slot, mask=in_block & (block < routed_blocks), other=0)
        shared_row = (block - routed_blocks) % shared_blocks * 128 + member
        row = gl.where(block < routed_blocks, gl.maximum(pair, 0) // top_k, gl.minimum(shared_row, tokens - 1))
    else:
        row = slot
    at_weights = weight_memory + of_weights.to(gl.int64) * depth
    at_rows = memory + row.to(gl.int64) * row_stride
    real = (tile < blocks * parts) & (expert >= 0)
    when = gl.where(real & (is_weight | in_block), when, -1)
    return gl.where(is_weight, at_weights, at_rows) - when, when


@gluon.jit
def _ask(where, when, k, depth: gl.constexpr):
    now = (k % ASKED == when) & (k - when + ASKED <= depth)
    gl.inline_asm_elementwise(_ASK, "=r,l,r", [where + k, now.to(gl.int32)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _feed(sources, memory, barriers, plan, kinds, asks: gl.constexpr):
    """Bring each depth of each tile by the copy engine: two times 64 rows, and two halves of the weight rows."""
    hidden, _, _, weights, _ = sources
    rows, columns = memory
    full, empty, _ = barriers
    _, _, _, _, _, _, blocks = plan
    parts, depth, stages, gated, _ = kinds
    stage = 0
    turn = 1
    asked = ask_expert(gl.program_id(0) // parts, plan)
    for tile in range(gl.program_id(0), blocks * parts, gl.num_programs(0)):
        block = tile // parts
        expert = expert_of(asked, block, plan)
        later = tile + gl.num_programs(0)
        asked = ask_expert(later // parts, plan)
        if expert >= 0:
            first, second = _weight_rows(expert, tile % parts, parts, gated)
            if asks:
                where, when = _asked(later, asked, sources, plan, kinds)
            for k in range(0, depth, 64):
                mbarrier.wait(empty.index(stage), turn)
                ready = full.index(stage)
                mbarrier.expect(ready, (128 + 256) * 64 * 2)
                tma.async_copy_global_to_shared(hidden, [block * 128, k], ready, rows.index(stage * 2))
                tma.async_copy_global_to_shared(hidden, [block * 128 + 64, k], ready, rows.index(stage * 2 + 1))
                tma.async_copy_global_to_shared(weights, [first, k], ready, columns.index(stage * 2))
                tma.async_copy_global_to_shared(weights, [second, k], ready, columns.index(stage * 2 + 1))
                if asks:
                    _ask(where, when, k, depth)
                stage = (stage + 1) % stages
                turn = turn ^ (stage == 0).to(gl.int32)


@gluon.jit
def _places(row_stride, group: gl.constexpr, block, plan, top_k: gl.constexpr):
    """Where in x the first 64 columns of a group's rows lie, int32 [64, 64]; rows without a pair take another's."""
    order, _, tokens, routed_blocks, shared_blocks, _, _ = plan
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    member = gl.arange(0, 64, layout=gl.SliceLayout(1, by_row))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, by_row))
    if block < routed_blocks:
        token = gl.maximum(gl.load(order + (block * 2 + group) * 64 + member), 0) // top_k
    else:
        token = ((block - routed_blocks) % shared_blocks * 2 + group) * 64 + member
        token = gl.minimum(token, tokens - 1)
    return token[:, None] * row_stride + column[None, :]


@gluon.jit
def _gather(sources, memory, barriers, plan, kinds, asks: gl.constexpr):
    """As ``_feed``, but rows come from x itself by asynchronous copies of 128 threads, each of which arrives when its
    own are there, since the copy engine cannot gather; weights by the engine."""
    _, x, row_stride, weights, _ = sources
    rows, columns = memory
    full, empty, _ = barriers
    _, _, _, _, _, _, blocks = plan
    parts, depth, stages, gated, top_k = kinds
    stage = 0
    turn = 1
    asked = ask_expert(gl.program_id(0) // parts, plan)
    for tile in range(gl.program_id(0), blocks * parts, gl.num_programs(0)):
        block = tile // parts
        expert = expert_of(asked, block, plan)
        later = tile + gl.num_programs(0)
        asked = ask_expert(later // parts, plan)
        if expert >= 0:
            first, second = _weight_rows(expert, tile % parts, parts, gated)
            places_0 = _places(row_stride, 0, block, plan, top_k)
            places_1 = _places(row_stride, 1, block, plan, top_k)
            if asks:
                where, when = _asked(later, asked, sources, plan, kinds)
            for k in range(0, depth, 64):
                mbarrier.wait(empty.index(stage), turn)
                ready = full.index(stage)
                mbarrier.expect(ready, 256 * 64 * 2)
                tma.async_copy_global_to_shared(weights, [first, k], ready, columns.index(stage * 2))
                tma.async_copy_global_to_shared(weights, [second, k], ready, columns.index(stage * 2 + 1))
                async_copy.async_copy_global_to_shared(rows.index(stage * 2), x + (places_0 + k))
                async_copy.async_copy_global_to_shared(rows.index(stage * 2 + 1), x + (places_1 + k))
                async_copy.mbarrier_arrive(ready, increment_count=False)
                if asks:
                    _ask(where, when, k, depth)
                stage = (stage + 1) % stages
                turn = turn ^ (stage == 0).to(gl.int32)


@gluon.jit
def supply(sources, memory, barriers, plan, kinds, how):
    """Rows and weights of each depth of each tile to shared memory, as soon as what lay there was used."""
    (asks,) = how
    _, _, _, gated, _ = kinds
    if gated:
        _gather(sources, memory, barriers, plan, kinds, asks)
    else:
        _feed(sources, memory, barriers, plan, kinds, asks)
