"""Triton pools of steps with sequences of any lengths: one kernel that pools, one that keeps the tails behind it.

A program of the first takes one pool that the step completes. Its members lie in the step or, the oldest of a
sequence's first pool, in the ring, which the second kernel must not write before all are read.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sidestream.core.ring import RingPlan
from sidestream.ops.triton_rounding import lone_product


@triton.jit(do_not_specialize=["tokens"])
def _pool_kernel(
    k, gate, ape, tail, out, pools, window_rows, carry_rows, tokens,
    k_row, k_dim, gate_row, gate_dim, ape_row, ape_dim, tail_row,
    KPOOL: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    pool = tl.program_id(0).to(tl.int64)
    member, dims = tl.arange(0, MEMBERS), tl.arange(0, DIM)[None, :]
    inside = member < KPOOL
    end = tl.load(pools + pool)
    # Row 0 of the plan's source stands for what no complete pool has, then come the step's tokens, then the ring's.
    source = tl.load(window_rows + end * KPOOL + member, mask=inside, other=0)
    own, carried = ((source >= 1) & (source <= tokens))[:, None], (source > tokens)[:, None]
    row = tl.load(carry_rows + source - tokens - 1, mask=source > tokens, other=0)[:, None]
    token = (source - 1)[:, None]
    key = tl.load(k + token * k_row + dims * k_dim, mask=own, other=0.0).to(tl.float32)
    score = tl.load(gate + token * gate_row + dims * gate_dim, mask=own, other=0.0).to(tl.float32)
    key += tl.load(tail + row * tail_row + dims, mask=carried, other=0.0).to(tl.float32)
    score += tl.load(tail + row * tail_row + DIM + dims, mask=carried, other=0.0).to(tl.float32)
    score += tl.load(ape + member[:, None] * ape_row + dims * ape_dim, mask=inside[:, None], other=0.0).to(tl.float32)
    score = tl.where(inside[:, None], score, float("-inf"))
    raw = tl.exp(score - tl.max(score, axis=0)[None, :])
    pooled = tl.sum(lone_product(raw / tl.sum(raw, axis=0)[None, :], key), axis=0)
    tl.store(out + pool * DIM + tl.arange(0, DIM), pooled.to(out.dtype.element_ty))


@triton.jit
def _keep_kernel(
    k, gate, tail, keep_tokens, keep_rows, k_row, k_dim, gate_row, gate_dim, tail_row, DIM: tl.constexpr,
):  # fmt: skip
    kept = tl.program_id(0).to(tl.int64)
    token, row, dims = tl.load(keep_tokens + kept), tl.load(keep_rows + kept), tl.arange(0, DIM)
    key = tl.load(k + token * k_row + dims * k_dim)
    score = tl.load(gate + token * gate_row + dims * gate_dim)
    tl.store(tail + row * tail_row + dims, key.to(tail.dtype.element_ty))
    tl.store(tail + row * tail_row + DIM + dims, score.to(tail.dtype.element_ty))


def pool_keys(
    k: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    *,
    tail: torch.Tensor,
    plan: RingPlan,
    pools: torch.Tensor,
) -> torch.Tensor:
    """As ``keys.pool_keys``, for what ``triton_keys.takes_pools`` accepts; what a slot held is taken as it was kept."""
    tokens, dim = k.shape
    out = torch.empty(pools.shape[0], dim, dtype=k.dtype, device=k.device)
    indices = (pools, plan.window_rows, plan.carry_rows, plan.keep_tokens, plan.keep_rows)
    assert all(index.is_contiguous() for index in indices), "index tensors of a step are contiguous"
    if pools.shape[0]:
        _pool_kernel[(pools.shape[0],)](
            k, gate, ape, tail, out, pools, plan.window_rows, plan.carry_rows, tokens,
            *k.stride(), *gate.stride(), *ape.stride(), tail.stride(0), KPOOL=plan.window,
            MEMBERS=triton.next_power_of_2(plan.window), DIM=dim, num_warps=1,
        )  # fmt: skip
    if plan.keep_rows.shape[0]:
        _keep_kernel[(plan.keep_rows.shape[0],)](
            k, gate, tail, plan.keep_tokens, plan.keep_rows, *k.stride(), *gate.stride(), tail.stride(0), DIM=dim,
            num_warps=1,
        )  # fmt: skip
    return out
