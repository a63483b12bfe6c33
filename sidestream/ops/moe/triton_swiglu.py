"""Clamped SwiGLU in Triton: a function for the kernels of the experts, and a kernel of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Outputs a program; with 4 warps, 8 a thread. Floor of T rows of I: 6 * T * I bytes in bf16."""


def swiglu(gate_up: torch.Tensor, *, limit: float | None) -> torch.Tensor:
    """``torch_impl.swiglu`` for [T, 2I] on the device, rounded once."""
    T, width = gate_up.shape
    inner = width // 2
    out = torch.empty(T, inner, dtype=gate_up.dtype, device=gate_up.device)
    block = min(BLOCK, triton.next_power_of_2(inner))
    _swiglu[(T, triton.cdiv(inner, block))](
        gate_up,
        out,
        inner,
        gate_up.stride(0),
        gate_up.stride(1),
        float(limit or 0.0),
        LIMITED=limit is not None,
        BLOCK=block,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def clamped_swiglu(gate: tl.tensor, up: tl.tensor, limit: float, LIMITED: tl.constexpr) -> tl.tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) in fp32. NaN stays, as it does in torch's clamp."""
    if LIMITED:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up)
    return gate * (1.0 / (1.0 + tl.exp(-gate))) * up


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu(
    gate_up: tl.tensor,
    out: tl.tensor,
    inner: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    limit: float,
    LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < inner
    at = gate_up + token * row_stride + column * column_stride
    gate = tl.load(at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(at + inner * column_stride, mask=there, other=0.0).to(tl.float32)
    value = clamped_swiglu(gate, up, limit, LIMITED)
    tl.store(out + token * inner + column, value.to(out.dtype.element_ty), mask=there)
