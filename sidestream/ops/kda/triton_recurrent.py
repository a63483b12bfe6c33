"""The recurrent step of Kimi Delta Attention for n tokens a request as a Triton kernel.

A program is one head of one request and some columns of its state, which are independent of the others; it stays in
registers over the n tokens. Floor: the state, read once and written once a token, 4 * (1 + n) * K * V bytes a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sidestream.ops.kda.torch_impl import L2_EPS

COLUMNS = 32
"""Of the state that a program takes: 16 KB of it at 128 channels."""
LARGEST = 256
"""Channels that are supported; powers of two."""


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor) -> bool:
    """Whether the kernel runs these: power-of-two head sizes, channels that stand together, a contiguous state."""
    K, V = state.shape[3:]
    sizes = all(8 <= size <= LARGEST and size & (size - 1) == 0 for size in (K, V))
    return sizes and state.is_contiguous() and all(x.stride(3) == 1 for x in (q, k, v))


def recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    start: torch.Tensor,
) -> torch.Tensor:
    """As ``torch_impl.recurrent``; for what ``takes`` allows."""
    R, n, H, K = q.shape
    V = v.shape[3]
    out = torch.empty(R, n, H, V, dtype=v.dtype, device=v.device)
    columns = min(COLUMNS, V)
    if out.numel():
        _recurrent[(H * (V // columns), R)](
            q,
            k,
            v,
            g.contiguous(),
            beta.contiguous(),
            state,
            out,
            slots,
            start,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            n,
            H,
            L2_EPS,
            VERSIONS=state.shape[1],
            K=K,
            V=V,
            COLUMNS=columns,
            num_warps=4,
        )
    return out


@triton.jit(do_not_specialize=["n"])  # type: ignore[untyped-decorator]
def _recurrent(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    slots: tl.tensor,
    start: tl.tensor,
    q_request: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_request: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_request: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    n: tl.tensor,
    H: tl.tensor,
    l2_eps: tl.tensor,
    VERSIONS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    h = tl.program_id(0) // (V // COLUMNS)
    r = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, K)
    column = (tl.program_id(0) % (V // COLUMNS)) * COLUMNS + tl.arange(0, COLUMNS)
    tile = channel[:, None] * V + column[None, :]
    position = tl.load(start + r)
    slot = tl.load(slots + r).to(tl.int64)
    old = state + ((slot * VERSIONS + position % VERSIONS) * H + h) * K * V
    memory = tl.load(old + tile, mask=position > 0, other=0.0)
    q += r * q_request + h * q_head
    k += r * k_request + h * k_head
    v += r * v_request + h * v_head
    for i in range(n):
        here = (r * n + i) * H + h
        query = tl.load(q + i * q_token + channel).to(tl.float32)
        key = tl.load(k + i * k_token + channel).to(tl.float32)
        query *= tl.rsqrt(tl.sum(query * query, axis=0) + l2_eps) * (K**-0.5)
        key *= tl.rsqrt(tl.sum(key * key, axis=0) + l2_eps)
        memory *= tl.exp(tl.load(g + here * K + channel))[:, None]
        recalled, seen = tl.split(tl.sum(tl.join(memory * key[:, None], memory * query[:, None]), axis=0))
        value = tl.load(v + i * v_token + column).to(tl.float32)
        error = (value - recalled) * tl.load(beta + here).to(tl.float32)
        mixed = seen + tl.sum(query * key, axis=0) * error
        memory += key[:, None] * error[None, :]
        new = state + ((slot * VERSIONS + (position + i + 1) % VERSIONS) * H + h) * K * V
        tl.store(new + tile, memory)
        tl.store(out + here * V + column, mixed.to(out.dtype.element_ty))
