"""The feeding role of ``triton_expert_roles``: rows and weights of each depth to shared memory (Gluon, Hopper only).

All programs go down the depth at about the same time, so whoever reads weights first waits for memory, and those who
read the same with it. To ask the L2 cache a tile ahead was slower by 6 to 11 %.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma


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
def _feed(sources, memory, barriers, plan, kinds):
    """Bring each depth of each tile by the copy engine: two times 64 rows, and two halves of the weight rows."""
    hidden, _, weights = sources
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
        asked = ask_expert((tile + gl.num_programs(0)) // parts, plan)
        if expert >= 0:
            first, second = _weight_rows(expert, tile % parts, parts, gated)
            for k in range(0, depth, 64):
                mbarrier.wait(empty.index(stage), turn)
                ready = full.index(stage)
                mbarrier.expect(ready, (128 + 256) * 64 * 2)
                tma.async_copy_global_to_shared(hidden, [block * 128, k], ready, rows.index(stage * 2))
                tma.async_copy_global_to_shared(hidden, [block * 128 + 64, k], ready, rows.index(stage * 2 + 1))
                tma.async_copy_global_to_shared(weights, [first, k], ready, columns.index(stage * 2))
                tma.async_copy_global_to_shared(weights, [second, k], ready, columns.index(stage * 2 + 1))
                stage = (stage + 1) % stages
                turn = turn ^ (stage == 0)


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
def _gather(sources, memory, barriers, plan, kinds):
    """As ``_feed``, but rows come from x itself by asynchronous copies of 128 threads, each of which arrives when its
    own are there, since the copy engine cannot gather; weights by the engine."""
    x, row_stride, weights = sources
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
        asked = ask_expert((tile + gl.num_programs(0)) // parts, plan)
        if expert >= 0:
            first, second = _weight_rows(expert, tile % parts, parts, gated)
            places_0 = _places(row_stride, 0, block, plan, top_k)
            places_1 = _places(row_stride, 1, block, plan, top_k)
            for k in range(0, depth, 64):
                mbarrier.wait(empty.index(stage), turn)
                ready = full.index(stage)
                mbarrier.expect(ready, 256 * 64 * 2)
                tma.async_copy_global_to_shared(weights, [first, k], ready, columns.index(stage * 2))
                tma.async_copy_global_to_shared(weights, [second, k], ready, columns.index(stage * 2 + 1))
                async_copy.async_copy_global_to_shared(rows.index(stage * 2), x + (places_0 + k))
                async_copy.async_copy_global_to_shared(rows.index(stage * 2 + 1), x + (places_1 + k))
                async_copy.mbarrier_arrive(ready, increment_count=False)
                stage = (stage + 1) % stages
                turn = turn ^ (stage == 0)


@gluon.jit
def supply(sources, memory, barriers, plan, kinds):
    """Rows and weights of each depth of each tile to shared memory, as soon as what lay there was used."""
    _, _, _, gated, _ = kinds
    if gated:
        _gather(sources, memory, barriers, plan, kinds)
    else:
        _feed(sources, memory, barriers, plan, kinds)
