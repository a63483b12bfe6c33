"""Experts of two tokens and more in Triton: pairs are grouped by expert on the device, in blocks of equal height.

Four launches: the plan (which pairs make up each block), gate and up with the clamped SwiGLU behind them, down, and
each token's weighted sum in the order of its choice (``triton_sum``), which may be left to whoever reads it. Grids
follow from sizes alone: blocks beyond those that the choice needs leave at once. An expert's weights are read by its
own blocks only, so what nobody chose is never read. Sizes that change from step to step are not specialised, so that a
new one never compiles anything.

A pair is one token at one of its experts. Numbers: token * top_k + place for chosen ones, then tokens * top_k +
shared * tokens + token for shared ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from sidestream.ops.moe.expert_sum import ExpertSum
from sidestream.ops.moe.triton_plan import plan
from sidestream.ops.moe.triton_sum import summed
from sidestream.ops.moe.triton_swiglu import clamped_swiglu
from sidestream.ops.moe.triton_tiles import ExpertTiles, dividing

UPCAST = bool(triton.knobs.runtime.interpret)
"""The interpreter multiplies bf16 wrongly."""
FP32_PARTIAL_TOKENS = 64
"""Tokens up to which the experts' results stay fp32 before their sum; beyond, they take the model's dtype, as the
reference's do, for half the bytes."""


def experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_shared: int,
    swiglu_limit: float | None,
    tiles: ExpertTiles,
) -> torch.Tensor:
    """``torch_impl.experts`` for at least one token, contiguous weights, and sizes that 16 divides.

    An id of -1 takes no expert: padding rows that have it cost no weights, and get the shared experts' sum alone.
    A row's bits depend on the row, on the number of tokens and on ``tiles``, never on what other tokens chose.
    """
    limit = swiglu_limit
    pending = unsummed(x, w13, w2, weights=weights, ids=ids, num_shared=num_shared, swiglu_limit=limit, tiles=tiles)
    return summed(pending, pdl=tiles.pdl and not UPCAST)


def unsummed(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    weights: torch.Tensor,
    ids: torch.Tensor,
    num_shared: int,
    swiglu_limit: float | None,
    tiles: ExpertTiles,
) -> ExpertSum:
    """``experts`` but for its last launch."""
    T, H = x.shape
    top_k, num_experts = ids.shape[1], w13.shape[0] - num_shared
    pairs, rows = T * top_k, tiles.rows
    routed_blocks = (pairs + min(num_experts, pairs) * (rows - 1)) // rows
    shared_blocks = triton.cdiv(T, rows)
    blocks = routed_blocks + num_shared * shared_blocks
    ids = ids.contiguous()
    pdl = tiles.pdl and not UPCAST
    order, block_expert = plan(ids, num_experts=num_experts, rows=rows, blocks=routed_blocks, pdl=pdl)
    where = (order, block_expert, T, routed_blocks, shared_blocks, num_experts)
    if not tiles.roles:
        dtype = torch.float32 if T <= FP32_PARTIAL_TOKENS else x.dtype
        partial = torch.empty(pairs + num_shared * T, H, dtype=dtype, device=x.device)
        _multiply(x, w13, w2, partial, where, blocks=blocks, top_k=top_k, swiglu_limit=swiglu_limit, tiles=tiles)
    else:
        from sidestream.ops.moe import triton_expert_roles  # for Hopper alone

        run = triton_expert_roles.partial_sums
        partial = run(x, w13, w2, where, blocks=blocks, top_k=top_k, swiglu_limit=swiglu_limit)
    return ExpertSum(partial, weights.contiguous(), ids, num_shared, x.dtype)


def _multiply(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    partial: torch.Tensor,
    where: tuple[torch.Tensor, torch.Tensor, int, int, int, int],
    *,
    blocks: int,
    top_k: int,
    swiglu_limit: float | None,
    tiles: ExpertTiles,
) -> None:
    """partial [pairs, H] = each pair's row through its expert. ``where``: as ``_block`` takes it."""
    H, inner, rows = x.shape[1], w2.shape[2], tiles.rows
    pdl = tiles.pdl and not UPCAST
    hidden = torch.empty(blocks * rows, inner, dtype=x.dtype, device=x.device)
    columns, depth = dividing(inner, tiles.gate_up.columns), dividing(H, tiles.gate_up.depth)
    _gate_up[(blocks * (inner // columns),)](
        x,
        _described(w13.view(-1, H), columns, depth) if tiles.described else w13,
        hidden,
        *where,
        x.stride(0),
        float(swiglu_limit or 0.0),
        TOP_K=top_k,
        H=H,
        INNER=inner,
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=depth,
        LIMITED=swiglu_limit is not None,
        UPCAST=UPCAST,
        DESCRIBED=tiles.described,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=tiles.gate_up.warps,
        num_stages=tiles.gate_up.stages,
    )
    columns, depth = dividing(H, tiles.down.columns), dividing(inner, tiles.down.depth)
    _down[(blocks * (H // columns),)](
        _described(hidden, rows, depth) if tiles.described else hidden,
        _described(w2.view(-1, inner), columns, depth) if tiles.described else w2,
        partial,
        *where,
        TOP_K=top_k,
        H=H,
        INNER=inner,
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=depth,
        UPCAST=UPCAST,
        DESCRIBED=tiles.described,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=tiles.down.warps,
        num_stages=tiles.down.stages,
    )


def _described(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """For loads of [rows, columns] from a contiguous matrix."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


@triton.jit  # type: ignore[untyped-decorator]
def _tile(routed_blocks: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """Block and part of a program. Blocks of shared experts, which are always there, begin; those that the choice does
    not need end, so that programs which do nothing fill no gap between others."""
    block, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    shared = tl.num_programs(0) // PARTS - routed_blocks
    return tl.where(block < shared, routed_blocks + block, block - shared), part


@triton.jit  # type: ignore[untyped-decorator]
def _block(
    block: tl.tensor,
    order: tl.tensor,
    block_expert: tl.tensor,
    tokens: tl.tensor,
    routed_blocks: tl.tensor,
    shared_blocks: tl.tensor,
    num_experts: tl.tensor,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Expert (-1: none), pairs [ROWS] (-1: none) and tokens [ROWS] of a block; shared experts' are numbered last."""
    rows = tl.arange(0, ROWS)
    if block < routed_blocks:
        expert = tl.load(block_expert + block)
        pair = tl.load(order + block * ROWS + rows, mask=(rows >= 0) & (expert >= 0), other=-1)
        token = tl.maximum(pair, 0) // TOP_K
    else:
        shared = (block - routed_blocks) // shared_blocks
        expert = num_experts + shared
        token = (block - routed_blocks) % shared_blocks * ROWS + rows
        pair = tl.where(token < tokens, tokens * (TOP_K + shared) + token, -1)
        token = tl.minimum(token, tokens - 1)
    return expert, pair, token


@triton.jit  # type: ignore[untyped-decorator]
def _dot(a: tl.tensor, b: tl.tensor, total: tl.tensor, UPCAST: tl.constexpr) -> tl.tensor:
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit(do_not_specialize=["tokens", "routed_blocks", "shared_blocks", "num_experts"])  # type: ignore[untyped-decorator]
def _gate_up(
    x: tl.tensor,
    w13: tl.tensor,
    hidden: tl.tensor,
    order: tl.tensor,
    block_expert: tl.tensor,
    tokens: tl.tensor,
    routed_blocks: tl.tensor,
    shared_blocks: tl.tensor,
    num_experts: tl.tensor,
    x_stride: tl.tensor,
    limit: float,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    LIMITED: tl.constexpr,
    UPCAST: tl.constexpr,
    DESCRIBED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """hidden [blocks * ROWS, INNER] = SwiGLU of the pairs' gate and up, COLUMNS of each a program.

    Rows without a pair become zeros. Neighbouring programs share a block's rows, and then an expert's weights, so that
    both stay in the L2 cache.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block, part = _tile(routed_blocks, INNER // COLUMNS)
    expert, pair, token = _block(
        block, order, block_expert, tokens, routed_blocks, shared_blocks, num_experts, TOP_K, ROWS
    )
    if expert < 0:
        return
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    x_at = x + token.to(tl.int64)[:, None] * x_stride + k[None, :]
    there = (pair >= 0)[:, None]
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    if DESCRIBED:
        first = expert * (2 * INNER) + part * COLUMNS
        for depth in range(0, H, DEPTH):
            row = tl.load(x_at + depth, mask=there, other=0.0)
            gate = _dot(row, w13.load([first, depth]).T, gate, UPCAST)
            up = _dot(row, w13.load([first + INNER, depth]).T, up, UPCAST)
    else:
        gate_at = w13 + expert.to(tl.int64) * (2 * INNER * H) + column[None, :] * H + k[:, None]
        for _ in range(0, H, DEPTH):
            row = tl.load(x_at, mask=there, other=0.0)
            gate = _dot(row, tl.load(gate_at), gate, UPCAST)
            up = _dot(row, tl.load(gate_at + INNER * H), up, UPCAST)
            x_at += DEPTH
            gate_at += DEPTH
    value = clamped_swiglu(gate, up, limit, LIMITED)
    slot = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(hidden + slot[:, None] * INNER + column[None, :], value.to(hidden.dtype.element_ty))


@triton.jit(do_not_specialize=["tokens", "routed_blocks", "shared_blocks", "num_experts"])  # type: ignore[untyped-decorator]
def _down(
    hidden: tl.tensor,
    w2: tl.tensor,
    partial: tl.tensor,
    order: tl.tensor,
    block_expert: tl.tensor,
    tokens: tl.tensor,
    routed_blocks: tl.tensor,
    shared_blocks: tl.tensor,
    num_experts: tl.tensor,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
    DESCRIBED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """partial [pairs, H] = hidden through their experts' w2, without the routing weight."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block, part = _tile(routed_blocks, H // COLUMNS)
    expert, pair, _ = _block(block, order, block_expert, tokens, routed_blocks, shared_blocks, num_experts, TOP_K, ROWS)
    if expert < 0:
        return
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if DESCRIBED:
        first = expert * H + part * COLUMNS
        for depth in range(0, INNER, DEPTH):
            total = _dot(hidden.load([block * ROWS, depth]), w2.load([first, depth]).T, total, UPCAST)
    else:
        slot = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        hidden_at = hidden + slot[:, None] * INNER + k[None, :]
        w2_at = w2 + expert.to(tl.int64) * (H * INNER) + column[None, :] * INNER + k[:, None]
        for _step in range(0, INNER, DEPTH):
            total = _dot(tl.load(hidden_at), tl.load(w2_at), total, UPCAST)
            hidden_at += DEPTH
            w2_at += DEPTH
    at = partial + pair.to(tl.int64)[:, None] * H + column[None, :]
    tl.store(at, total.to(partial.dtype.element_ty), mask=(pair >= 0)[:, None])
