"""Rounding in Triton kernels: products by themselves, and to bf16 by the instruction that converts two numbers at once.

The one for a single number is four times as slow, and the compiler takes it wherever a rounded number is widened again.
Interpreted kernels have no assembly, so they pass ``FAST`` as false.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def narrowed(value: tl.tensor, dtype: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """fp32 in ``dtype``. ``FAST``, for bf16: two numbers at a time, where there are two."""
    if FAST and value.numel % 2 == 0:
        result = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [value], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        result = value.to(dtype)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def rounded(value: tl.tensor, dtype: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """fp32 rounded to what ``dtype`` holds. ``FAST``, for bf16: with zero for the other number."""
    if FAST:
        result = tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, 0f00000000, $1; shl.b32 $0, t, 16; }",
            "=f,f",
            [value],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        result = value.to(dtype).to(tl.float32)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def bf16_terms(factor: tl.tensor) -> tl.tensor:
    """fp32 as three bf16 terms (24 bits), largest first, whose products with bf16 are exact. Compiled kernels only."""
    high = narrowed(factor, tl.bfloat16, True)
    rest = factor - high.to(tl.float32)
    middle = narrowed(rest, tl.bfloat16, True)
    return high, middle, narrowed(rest - middle.to(tl.float32), tl.bfloat16, True)


@triton.jit  # type: ignore[untyped-decorator]
def not_before(value: tl.tensor) -> tl.tensor:
    """fp32 ``value``, used only behind what stands above: the compiler would else move its use up to its load, and wait
    there. Compiled kernels only."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit  # type: ignore[untyped-decorator]
def lone_product(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """fp32 ``a * b``, rounded by itself, for a sum across threads of which each has one.

    A bare product is fused into the first addition: each of two threads rounds the other's product and not its own, and
    their sums differ. Which of them is stored is then nobody's choice.
    """
    return tl.fma(a, b, 0.0)
