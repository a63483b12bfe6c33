"""Asks the L2 cache for memory (Hopper's ``cp.async.bulk.prefetch``): a kernel that returns before any of it is there.

Between two large products of a decode step lie 8 to 30 us of small kernels, during which memory idles: 16 MB are 3.7 us
of it. The cache holds 50 MB; what is asked for is gone again once much more than that has passed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PIECE = 4096
"""Bytes that a thread asks for; a multiple of 16, as addresses are."""
THREADS = 32
COMPILED = not triton.knobs.runtime.interpret
_ASK = tl.constexpr(
    "{ .reg .pred own; .reg .b32 thread; mov.u32 thread, %tid.x; setp.lt.u32 own, thread, $3;"
    " @own cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }"
)
"""Threads beyond the number of addresses hold copies of them."""


def fetch(weight: torch.Tensor, size: int) -> None:
    """Ask for the first ``size`` bytes of a contiguous CUDA tensor at a multiple of 16 bytes, in whole pieces."""
    pieces = size // PIECE
    if pieces:
        _fetch[(triton.cdiv(pieces, THREADS),)](
            weight.view(-1).view(torch.uint8), pieces, PIECE=PIECE, THREADS=THREADS, PDL=COMPILED, launch_pdl=COMPILED,
            num_warps=1,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def ask(at: tl.tensor, COUNT: tl.constexpr, BYTES: tl.constexpr) -> None:
    """Ask for BYTES, a multiple of 16, at each of COUNT addresses, multiples of 16 too. Compiled code only."""
    size, count = tl.full([COUNT], BYTES, tl.int32), tl.full([COUNT], COUNT, tl.int32)
    tl.inline_asm_elementwise(_ASK, "=r,l,r,r", [at, size, count], tl.int32, False, 1)


@triton.jit(do_not_specialize=["pieces"])  # type: ignore[untyped-decorator]
def _fetch(
    memory: tl.tensor,
    pieces: tl.tensor,
    PIECE: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Reads nothing that another kernel writes, so it asks before it waits; it waits all the same, since what is
    launched behind it counts on everything before."""
    piece = tl.program_id(0) * THREADS + tl.arange(0, THREADS)
    at = memory + tl.minimum(piece, pieces - 1).to(tl.int64) * PIECE
    if PDL:
        ask(at, THREADS, PIECE)
        gdc_launch_dependents()
        gdc_wait()
