"""The rotation in Triton: one launch, a program for some heads of one token.

Floor: x once each way, 4 * T * H * D bytes in bf16; 16 KB a token at 64 heads of 64, so a decode step pays the launch
alone (predicted 2 us to 64 tokens) and 8,192 tokens 31 us (predicted 40).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ELEMENTS = 1024
"""Of x in a program; with 2 warps, 16 a thread; one warp where it has fewer, so that halves meet in registers. Twice as
many took 1.8 times as long at 8,192 tokens on an H200, when each element was a load of its own."""
COMPILED = not triton.knobs.runtime.interpret
"""Then a pair is launched while the kernel before ends (programmatic dependent launch), and waits before it reads."""


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
    block, half, warps = _sizes(heads, width, elements, warps)
    _rotate[(T, triton.cdiv(heads, block))](
        rows, cos, sin, out, heads, *rows.stride(), cos.stride(0), sin.stride(0), heads * width, width,
        half=width // 2, INTERLEAVED=interleaved, HEADS=block, HALF=half, num_warps=warps,
    )  # fmt: skip
    return out


def apply_rope_pair(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    """``torch_impl.apply_rope_pair`` for at least one token and head; the last dimension of ``out`` is contiguous."""
    T, heads, width = query.shape
    assert out.shape == query.shape, f"{tuple(out.shape)} for queries of {tuple(query.shape)}"
    key_out = torch.empty(T, width, dtype=key.dtype, device=key.device)
    block, half, warps = _sizes(heads, width, ELEMENTS, 2)
    _rotate_pair[(T, triton.cdiv(heads, block) + 1)](
        query, key, cos, sin, out, key_out, heads, *query.stride(), *key.stride(), cos.stride(0), sin.stride(0),
        *out.stride()[:2], half=width // 2, INTERLEAVED=interleaved, HEADS=block, HALF=half, PDL=COMPILED,
        num_warps=warps, launch_pdl=COMPILED,
    )  # fmt: skip
    return key_out


def _sizes(heads: int, width: int, elements: int, warps: int) -> tuple[int, int, int]:
    """(heads in a program, pairs of one as a power of two, warps)."""
    half = triton.next_power_of_2(width // 2)
    block = max(1, min(triton.next_power_of_2(heads), elements // (2 * half)))
    return block, half, max(1, min(warps, block * half // 256))


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
    out_token: tl.tensor,
    out_head: tl.tensor,
    half: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """out [T, heads, 2 * half], last dimension contiguous. A pair's members are neighbours or ``half`` apart."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    pair = tl.arange(0, HALF)
    c = tl.load(cos + token * cos_stride + pair, mask=pair < half, other=0.0)[None, :]
    s = tl.load(sin + token * sin_stride + pair, mask=pair < half, other=0.0)[None, :]
    x_row = x + token * token_stride + head * head_stride
    out_row = out + token * out_token + head * out_head
    _turn(x_row, out_row, head < heads, stride, c, s, half, INTERLEAVED, HEADS, HALF)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_pair(
    query: tl.tensor,
    key: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    key_out: tl.tensor,
    heads: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    stride: tl.tensor,
    key_token: tl.tensor,
    key_stride: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    half: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The last program of a token takes its key, the others its query. Shapes differ in both, and so must names:
    compiled code has one type for a name behind a branch."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF)
    c = tl.load(cos + token * cos_stride + pair, mask=pair < half, other=0.0)[None, :]
    s = tl.load(sin + token * sin_stride + pair, mask=pair < half, other=0.0)[None, :]
    if tl.program_id(1) == tl.num_programs(1) - 1:
        only = tl.arange(0, 1).to(tl.int64)[:, None]
        key_row, key_out_row = key + token * key_token + only, key_out + token * (2 * half) + only
        _turn(key_row, key_out_row, only == 0, key_stride, c, s, half, INTERLEAVED, 1, HALF)
    else:
        head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        row, out_row = query + token * token_stride + head * head_stride, out + token * out_token + head * out_head
        _turn(row, out_row, head < heads, stride, c, s, half, INTERLEAVED, HEADS, HALF)


@triton.jit  # type: ignore[untyped-decorator]
def _turn(
    x_row: tl.tensor,
    out_row: tl.tensor,
    there: tl.tensor,
    stride: tl.tensor,
    c: tl.tensor,
    s: tl.tensor,
    half: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Rows at ``x_row`` [HEADS, 1] to those at ``out_row``, by angles [1, HALF]."""
    if INTERLEAVED:
        # Both members are read and written as one run, so that accesses stay wide.
        lane = tl.arange(0, 2 * HALF)[None, :]
        inside = there & (lane < 2 * half)
        values = tl.load(x_row + lane * stride, mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(values, [HEADS, HALF, 2]))
        turned = tl.reshape(tl.join(first * c - second * s, second * c + first * s), [HEADS, 2 * HALF])
        tl.store(out_row + lane, turned.to(out_row.dtype.element_ty), mask=inside)
    else:
        pair = tl.arange(0, HALF)[None, :]
        inside = there & (pair < half)
        first = tl.load(x_row + pair * stride, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x_row + (pair + half) * stride, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_row + pair, (first * c - second * s).to(out_row.dtype.element_ty), mask=inside)
        tl.store(out_row + half + pair, (second * c + first * s).to(out_row.dtype.element_ty), mask=inside)
