"""The rotation in Triton: one launch, a program for some heads of one token.

Floor: x once each way, 4 * T * H * D bytes in bf16; 16 KB a token at 64 heads of 64, so a decode step pays the launch
alone (predicted 2 us to 64 tokens) and 8,192 tokens 31 us (predicted 40).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ELEMENTS = 1024
"""Of x in a program; with 2 warps, 16 a thread; one warp where it has fewer, so that halves meet in registers. Twice as
many took 1.8 times as long at 8,192 tokens on an H200, when each element was a load of its own."""


def apply_rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
    elements: int = ELEMENTS,
    warps: int = 2,
) -> torch.Tensor:
    """``torch_impl.apply_rope`` for at least one token and head."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x if x.dim() == 3 else x.unsqueeze(1)
    T, heads, width = rows.shape
    half = triton.next_power_of_2(width // 2)
    block = max(1, min(triton.next_power_of_2(heads), elements // (2 * half)))
    _rotate[(T, triton.cdiv(heads, block))](
        rows,
        cos,
        sin,
        out,
        heads,
        rows.stride(0),
        rows.stride(1),
        rows.stride(2),
        cos.stride(0),
        sin.stride(0),
        half=width // 2,
        INTERLEAVED=interleaved,
        HEADS=block,
        HALF=half,
        num_warps=max(1, min(warps, block * half // 256)),
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    stride: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    half: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """out [T, heads, 2 * half], contiguous. A pair's members are neighbours or ``half`` apart."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    c = tl.load(cos + token * cos_stride + pair, mask=pair < half, other=0.0)[None, :]
    s = tl.load(sin + token * sin_stride + pair, mask=pair < half, other=0.0)[None, :]
    x_row = x + token * token_stride + head.to(tl.int64)[:, None] * head_stride
    out_row = out + (token * heads + head[:, None]) * (2 * half)
    if INTERLEAVED:
        # Both members are read and written as one run, so that accesses stay wide.
        lane = tl.arange(0, 2 * HALF)[None, :]
        inside = (head[:, None] < heads) & (lane < 2 * half)
        values = tl.load(x_row + lane * stride, mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(values, [HEADS, HALF, 2]))
        turned = tl.reshape(tl.join(first * c - second * s, second * c + first * s), [HEADS, 2 * HALF])
        tl.store(out_row + lane, turned.to(out.dtype.element_ty), mask=inside)
    else:
        there = (head[:, None] < heads) & (pair[None, :] < half)
        first = tl.load(x_row + pair[None, :] * stride, mask=there, other=0.0).to(tl.float32)
        second = tl.load(x_row + (pair[None, :] + half) * stride, mask=there, other=0.0).to(tl.float32)
        tl.store(out_row + pair[None, :], (first * c - second * s).to(out.dtype.element_ty), mask=there)
        tl.store(out_row + half + pair[None, :], (second * c + first * s).to(out.dtype.element_ty), mask=there)
