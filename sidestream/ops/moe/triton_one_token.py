"""Experts of a single token in Triton: two launches that stream the chosen experts' weights once.

Floor at H = 4,096, I = 2,048, eight experts and a shared one: 302 MB of gate and up, 71 us, then 151 MB of down, 35 us
at 4.28 TB/s; predicted 75 + 38 us and two launches. Products are sums of weight rows times the token, in fp32 on the
plain units: 0.5 operations a byte are far below their rate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sidestream.ops.moe.triton_swiglu import clamped_swiglu
from sidestream.ops.moe.triton_tiles import ExpertTiles, dividing

INTERPRETED = bool(triton.knobs.runtime.interpret)


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
    """``torch_impl.experts`` for x [1, H] with contiguous weights and sizes that 16 divides. An id of -1 takes none."""
    H, inner, top_k = x.shape[1], w2.shape[2], ids.shape[1]
    slots, num_experts = top_k + num_shared, w13.shape[0] - num_shared
    hidden = torch.empty(slots, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(1, H, dtype=x.dtype, device=x.device)
    ids = ids.contiguous()
    pdl = tiles.pdl and not INTERPRETED
    up_columns, down_columns = dividing(inner, tiles.gate_up.columns), dividing(H, tiles.down.columns)
    _gate_up_one[(slots * (inner // up_columns),)](
        x,
        w13,
        ids,
        hidden,
        num_experts,
        x.stride(1),
        float(swiglu_limit or 0.0),
        TOP_K=top_k,
        H=H,
        INNER=inner,
        COLUMNS=up_columns,
        DEPTH=dividing(H, tiles.gate_up.depth),
        LIMITED=swiglu_limit is not None,
        STAGES=tiles.gate_up.stages,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=tiles.gate_up.warps,
    )
    _down_one[(H // down_columns,)](
        hidden,
        w2,
        ids,
        weights.contiguous(),
        out,
        num_experts,
        TOP_K=top_k,
        SLOTS=slots,
        H=H,
        INNER=inner,
        COLUMNS=down_columns,
        DEPTH=dividing(inner, tiles.down.depth),
        STAGES=tiles.down.stages,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=tiles.down.warps,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _expert_of(slot: tl.tensor, ids: tl.tensor, num_experts: tl.tensor, TOP_K: tl.constexpr) -> tl.tensor:
    """The token's chosen experts, -1 for none, then the shared ones; int64, since it numbers weights beyond 2 ** 31
    bytes."""
    chosen = tl.load(ids + slot, mask=slot < TOP_K, other=0).to(tl.int64)
    return tl.where(slot < TOP_K, chosen, num_experts + slot - TOP_K)


@triton.jit(do_not_specialize=["num_experts"])  # type: ignore[untyped-decorator]
def _gate_up_one(
    x: tl.tensor,
    w13: tl.tensor,
    ids: tl.tensor,
    hidden: tl.tensor,
    num_experts: tl.tensor,
    x_stride: tl.tensor,
    limit: float,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    LIMITED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """hidden [slots, INNER]: COLUMNS rows of gate and of up a program, whole rows."""
    slot, part = tl.program_id(0) // (INNER // COLUMNS), tl.program_id(0) % (INNER // COLUMNS)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    if PDL:
        gdc_wait()
    expert = _expert_of(slot, ids, num_experts, TOP_K)
    if expert < 0:
        if PDL:
            gdc_launch_dependents()
        return
    gate_at = w13 + expert * (2 * INNER * H) + column[:, None] * H + k[None, :]
    gate = tl.zeros([COLUMNS, DEPTH], tl.float32)
    up = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for first in tl.range(0, H, DEPTH, num_stages=STAGES):
        row = tl.load(x + (first + k) * x_stride).to(tl.float32)[None, :]
        gate += tl.load(gate_at + first).to(tl.float32) * row
        up += tl.load(gate_at + first + INNER * H).to(tl.float32) * row
    if PDL:  # late, so that programs of the next kernel spread; behind the wait, since they read ids
        gdc_launch_dependents()
    value = clamped_swiglu(tl.sum(gate, 1), tl.sum(up, 1), limit, LIMITED)
    tl.store(hidden + slot * INNER + column, value.to(hidden.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _down_weights(
    step: tl.tensor,
    w2: tl.tensor,
    ids: tl.tensor,
    column: tl.tensor,
    k: tl.tensor,
    num_experts: tl.tensor,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    INNER: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """Where the weights of a step lie: INNER / DEPTH steps an expert."""
    slot, first = step // (INNER // DEPTH), step % (INNER // DEPTH) * DEPTH
    expert = tl.maximum(_expert_of(slot, ids, num_experts, TOP_K), 0)
    return w2 + expert * (H * INNER) + column[:, None] * INNER + first + k[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _weighted(
    step: tl.tensor,
    hidden: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    k: tl.tensor,
    TOP_K: tl.constexpr,
    INNER: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """Activations [DEPTH] of a step times the routing weight; zeros for no expert, whose own were never written."""
    slot, first = step // (INNER // DEPTH), step % (INNER // DEPTH) * DEPTH
    taken = tl.load(ids + slot, mask=slot < TOP_K, other=0) >= 0
    weight = tl.where(taken, tl.load(weights + slot, mask=slot < TOP_K, other=1.0), 0.0)
    return tl.load(hidden + slot * INNER + first + k, mask=taken, other=0.0).to(tl.float32) * weight


@triton.jit(do_not_specialize=["num_experts"])  # type: ignore[untyped-decorator]
def _down_one(
    hidden: tl.tensor,
    w2: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    num_experts: tl.tensor,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    H: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """out [H]: COLUMNS of it a program, over all experts in the order of the choice, shared ones last.

    The experts' weighted results are one sum of SLOTS * INNER products, so nothing is added between programs.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    # Weights and ids stand since before the kernel before, so the first weights need not wait for it.
    at = _down_weights(0, w2, ids, column, k, num_experts, TOP_K, H, INNER, DEPTH)
    ahead = tl.load(at).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = ahead * _weighted(0, hidden, ids, weights, k, TOP_K, INNER, DEPTH)[None, :]
    for step in tl.range(1, SLOTS * (INNER // DEPTH), num_stages=STAGES):
        at = _down_weights(step, w2, ids, column, k, num_experts, TOP_K, H, INNER, DEPTH)
        total += tl.load(at).to(tl.float32) * _weighted(step, hidden, ids, weights, k, TOP_K, INNER, DEPTH)[None, :]
    tl.store(out + column, tl.sum(total, 1).to(out.dtype.element_ty))
