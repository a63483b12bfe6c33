"""Asking for weights ahead: a Triton kernel that waits for the one before it has them brought to the L2 cache."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def prefetch(start: tl.tensor, first: tl.tensor, end: tl.tensor, CHUNK: tl.constexpr) -> None:
    """Bring ``CHUNK`` bytes from each byte ``first`` (int64) behind ``start`` on, below ``end``; waits for nothing.

    ``CHUNK`` and all offsets are multiples of 16. Every thread that holds an element asks: as many elements as threads,
    or more, ask once.
    """
    address = start.to(tl.int64) + tl.minimum(first, end - CHUNK)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [address, tl.zeros_like(address).to(tl.int32) + CHUNK],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
