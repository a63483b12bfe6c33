"""The weighted sum of a token's experts in Triton: a function for kernels that read it, and a kernel of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sidestream.ops.moe.expert_sum import ExpertSum
from sidestream.ops.moe.triton_tiles import dividing


def summed(pending: ExpertSum, *, pdl: bool = False) -> torch.Tensor:
    """[T, H] of ``pending``, in one launch."""
    T, top_k = pending.ids.shape
    H = pending.partial.shape[1]
    out = torch.empty(T, H, dtype=pending.dtype, device=pending.partial.device)
    block = dividing(H, 1024 if T > 64 else 256)
    _sum[(T, H // block)](
        pending.partial,
        pending.weights,
        pending.ids,
        out,
        T,
        H=H,
        TOP_K=top_k,
        SHARED=pending.num_shared,
        BLOCK=block,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _sum(
    partial: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """out [tokens, H]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    total = expert_sum(partial, weights, ids, token, column, column >= 0, tokens, total, H, TOP_K, SHARED)
    tl.store(out + token * H + column, total.to(out.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def expert_sum(
    partial: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    token: tl.tensor,
    column: tl.tensor,
    real: tl.tensor,
    tokens: tl.tensor,
    total: tl.tensor,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
) -> tl.tensor:
    """total, zeros, plus weights * partial over a token's choice in its order, then its shared experts, in fp32.
    ``token`` (int64) and ``column`` broadcast to the shape of ``total``; no column is read that is not ``real``."""
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        taken = (tl.load(ids + pair) >= 0) & real
        value = tl.load(weights + pair) * tl.load(partial + pair * H + column, mask=taken, other=0.0).to(tl.float32)
        total += tl.where(taken, value, 0.0)
    for shared in tl.static_range(SHARED):
        pair = token + tokens * (TOP_K + shared)
        total += tl.load(partial + pair * H + column, mask=real, other=0.0).to(tl.float32)
    return total
