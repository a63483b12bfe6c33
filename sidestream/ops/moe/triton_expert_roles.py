"""Products of the experts for prompts by warps with roles: one group feeds, the others multiply (Gluon, Hopper only).

``triton_grouped`` lets every warp of a program fetch and multiply. Here a tile is 64 rows of each of two warpgroups
times 256 weight rows, brought by the copy engine, but for rows of x, which are gathered by asynchronous copies of the
feeding warps. Barriers in shared memory pass depths of 64 on, so these are up to four ahead of the products, over the
end of a tile as well: programs stay and take tile after tile. A group waits for its product at once, since the other
group's keeps tensor cores busy, and hands the depth back before it begins with the next. At full speed, 4,096
operations a clock, tiles ask the L2 cache for 48 bytes a clock of each multiprocessor. A group whose 64 rows hold no
pair multiplies nothing.

Gluon has no interpreter: tests run this source with torch in its place, which knows neither warps nor layouts.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sidestream.ops.moe.triton_expert_feed import ask_expert, expert_of, supply
from sidestream.ops.moe.triton_tiles import ROLES

_PROGRAMS = 132
"""One a multiprocessor of an H100 or H200."""
STAGES = 4
"""Depths of 64 that shared memory has room for."""
_LEAD = gl.constexpr(1)
"""Depths of 64 that the first group is ahead of the second, so that they do what follows a product, where tensor cores
stand still, in turn. With 2 in place of 1 fewer are fetched ahead: 7.12 ms for 8,192 tokens, 6.67, and 6.79 with none
(``benchmarks/results/moe-prompts-h200-2026-12-01-second.json``)."""
_ALL = gl.constexpr(tl.PropagateNan.ALL)
_SILU = gl.constexpr(
    """{
    .reg .f32 e;
    mul.f32 e, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 e, e;
    add.f32 e, e, 0f3F800000;
    rcp.approx.ftz.f32 e, e;
    mul.f32 $0, $1, e;
    }"""
)
"""x / (1 + 2 ** (-x * log2(e))), to an ulp or two of fp32; a gate of -inf is NaN, as by the formula."""
_TILE = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
_RESULT = gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16)


def partial_sums(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    where: tuple[torch.Tensor, torch.Tensor, int, int, int, int],
    *,
    blocks: int,
    top_k: int,
    swiglu_limit: float | None,
) -> torch.Tensor:
    """Each pair's row of x [T, H] bf16 through its expert: [pairs, H], shared experts' pairs last.

    Arguments are as ``triton_grouped`` makes them, for blocks of ``ROLES.rows``; H is a multiple of 256, the inner size
    of 128.
    """
    T, num_experts = where[2], where[5]
    H, inner = w2.shape[1:]
    assert H % 256 == 0, f"hidden size {H} is no multiple of 256"
    assert inner % 128 == 0, f"inner size {inner} is no multiple of 128"
    if x.stride(0) % 16 or x.data_ptr() % 16:  # copies are of 16 bytes, and Triton knows of strides by 16 elements
        x = x.clone(memory_format=torch.contiguous_format)
    assert T * x.stride(0) < 2**31, f"{T} rows {x.stride(0)} apart are beyond 32 bits"
    partial = torch.empty(T * (top_k + w2.shape[0] - num_experts), H, dtype=x.dtype, device=x.device)
    hidden = torch.empty(blocks * ROLES.rows, inner, dtype=x.dtype, device=x.device)
    for source, weights, target, gated in (
        (x, w13.view(-1, H), _described(hidden, 64, _RESULT), True),
        (hidden, w2.view(-1, inner), partial, False),
    ):
        parts = inner // 128 if gated else H // 256
        products[(min(_PROGRAMS, blocks * parts),)](
            x if gated else _described(hidden, 64),
            source.stride(0),
            _described(weights, 128),
            target,
            *where,
            blocks,
            float(swiglu_limit or 0.0),
            top_k=top_k,
            parts=parts,
            depth=source.shape[1],
            stages=STAGES,
            gated=gated,
            limited=swiglu_limit is not None,
            num_warps=4,
        )
    return partial


def _described(matrix: torch.Tensor, rows: int, layout: gl.NVMMASharedLayout = _TILE) -> TensorDescriptor:
    """For copies of ``rows`` by 64 columns, or 128 in the layout of results."""
    columns = 64 if layout is _TILE else 128
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)


@gluon.jit
def _halves(total):
    """[64, 256] as two [64, 128]: every thread has its part of both."""
    return total.reshape([64, 2, 128]).permute((0, 2, 1)).split()


@gluon.jit
def _swiglu(gate, up, limit, limited: gl.constexpr):
    """``triton_swiglu.clamped_swiglu`` in half the instructions: the tensor cores wait for it."""
    if limited:
        gate = gl.minimum(gate, limit, propagate_nan=_ALL)
        up = gl.minimum(up, limit, propagate_nan=_ALL)
        up = gl.maximum(up, -limit, propagate_nan=_ALL)
    silu = gl.inline_asm_elementwise(_SILU, "=f,f", [gate], gl.float32, is_pure=True, pack=1)
    return silu * up


@gluon.jit
def _ask_pair(block, plan, group):
    """Begin to load the first pair of a group's rows; -1 if it has none, where the block is needed."""
    order, _, _, routed_blocks, _, _, _ = plan
    return gl.load(order + (block * 2 + group) * 64, mask=block < routed_blocks, other=0)


@gluon.jit
def _multiply(target, memory, barriers, plan, kinds, limit, mine):
    """The products of 64 rows of each tile, to their end: SwiGLU and ``hidden``, or ``partial`` by pair."""
    rows, columns, staged = memory
    full, empty, ahead = barriers
    order, _, tokens, routed_blocks, shared_blocks, _, blocks = plan
    parts, depth, stages, gated, top_k = kinds
    group, limited = mine
    products: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    stage = 0
    turn = 0
    first_step = _LEAD
    asked = ask_expert(gl.program_id(0) // parts, plan)
    head = _ask_pair(gl.program_id(0) // parts, plan, group)
    for tile in range(gl.program_id(0), blocks * parts, gl.num_programs(0)):
        block = tile // parts
        slot = (block * 2 + group) * 64
        shared_row = ((block - routed_blocks) % shared_blocks * 2 + group) * 64
        expert = expert_of(asked, block, plan)
        used = gl.where(block < routed_blocks, head, tokens - 1 - shared_row) >= 0
        asked = ask_expert((tile + gl.num_programs(0)) // parts, plan)
        head = _ask_pair((tile + gl.num_programs(0)) // parts, plan, group)
        if expert >= 0:
            if group > 0:
                mbarrier.wait(ahead, 0)
            if used:
                if not gated:
                    member = gl.arange(0, 64, layout=gl.SliceLayout(1, by_row))
                    if block < routed_blocks:
                        pair = gl.load(order + slot + member)
                    else:
                        token = shared_row + member
                        shared = (block - routed_blocks) // shared_blocks
                        pair = gl.where(token < tokens, tokens * (top_k + shared) + token, -1)
                total = gl.zeros([64, 256], gl.float32, layout=products)
                for step in range(depth // 64):
                    mbarrier.wait(full.index(stage), turn)
                    if gated:  # rows come by copies of threads
                        fence_async_shared()
                    row = rows.index(stage * 2 + group)
                    column = columns.index(stage).permute((1, 0))
                    total = warpgroup_mma(row, column, total, is_async=True)
                    total = warpgroup_mma_wait(0, [total])
                    mbarrier.arrive(empty.index(stage), count=1)
                    if group == 0:
                        mbarrier.arrive(ahead, count=1, pred=step == first_step)
                    stage = (stage + 1) % stages
                    turn = turn ^ (stage == 0)
                first_step = -1  # the others follow from now on
                if gated:
                    gate, up = _halves(total)
                    value = _swiglu(gate, up, limit, limited).to(gl.bfloat16)
                    tma.store_wait(0)
                    gl.thread_barrier()
                    staged.store(value)
                    fence_async_shared()
                    gl.thread_barrier()
                    tma.async_copy_shared_to_global(target, [slot, tile % parts * 128], staged)
                else:
                    at = tile % parts * 256 + gl.arange(0, 128, layout=gl.SliceLayout(0, by_row))
                    lines = target + pair.to(gl.int64)[:, None] * (parts * 256) + at[None, :]
                    left, right = _halves(total.to(gl.bfloat16))
                    gl.thread_barrier()
                    staged.store(left)
                    gl.thread_barrier()
                    gl.store(lines, staged.load(by_row), mask=(pair >= 0)[:, None])
                    gl.thread_barrier()
                    staged.store(right)
                    gl.thread_barrier()
                    gl.store(lines + 128, staged.load(by_row), mask=(pair >= 0)[:, None])
            else:
                for _ in range(depth // 64):
                    mbarrier.wait(full.index(stage), turn)
                    mbarrier.arrive(empty.index(stage), count=1)
                    stage = (stage + 1) % stages
                    turn = turn ^ (stage == 0)
    if gated:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens", "routed_blocks", "shared_blocks", "num_experts", "blocks"])
def products(
    source,
    row_stride,
    weights,
    target,
    order,
    block_expert,
    tokens,
    routed_blocks,
    shared_blocks,
    num_experts,
    blocks,
    limit,
    top_k: gl.constexpr,
    parts: gl.constexpr,
    depth: gl.constexpr,
    stages: gl.constexpr,
    gated: gl.constexpr,
    limited: gl.constexpr,
):
    """Rows times their experts' ``weights`` [experts * rows, depth], ``parts`` tiles of 256 weight rows an expert.

    ``source``: x [tokens, depth] where ``gated``, else a descriptor of hidden [blocks * 128, depth].
    ``target``: a descriptor of hidden [blocks * 128, parts * 128], or partial [pairs, parts * 256].
    Rows of ``hidden`` without a pair are written where their group has one, and mean nothing.
    """
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    result: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16)
    rows = gl.allocate_shared_memory(gl.bfloat16, [stages * 2, 64, 64], tile)
    halves = gl.allocate_shared_memory(gl.bfloat16, [stages * 2, 128, 64], tile)
    columns = halves._reinterpret(gl.bfloat16, [stages, 256, 64], tile)
    staged = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], result)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    ahead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ahead, count=1)
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=129 if gated else 1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.thread_barrier()
    plan = (order, block_expert, tokens, routed_blocks, shared_blocks, num_experts, blocks)
    kinds: gl.constexpr = (parts, depth, stages, gated, top_k)
    barriers = (full, empty, ahead)
    mine_0: gl.constexpr = (0, limited)
    mine_1: gl.constexpr = (1, limited)
    sources = (source, row_stride, weights)
    gl.warp_specialize(
        [
            (_multiply, (target, (rows, columns, staged.index(0)), barriers, plan, kinds, limit, mine_0)),
            (_multiply, (target, (rows, columns, staged.index(1)), barriers, plan, kinds, limit, mine_1)),
            (supply, (sources, (rows, halves), barriers, plan, kinds)),
        ],
        [4, 4],
        [224, 56],
    )
