"""Triton form of filling in sampled tokens: one small kernel in front of every step that runs ahead."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 128


# One kernel for all sizes and places, since a step of any size may be the first to run ahead.
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["token_ids", "sources", "sampled"])
def _fill_kernel(token_ids, sources, sampled, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + row, mask=row < rows, other=-1)
    unknown = source >= 0
    tl.store(token_ids + row, tl.load(sampled + source, mask=unknown, other=0), mask=unknown)


def fill_sampled(token_ids: torch.Tensor, sources: torch.Tensor, sampled: torch.Tensor) -> None:
    """As ``torch_impl.fill_sampled``, for contiguous tensors."""
    rows = token_ids.shape[0]
    if rows:
        _fill_kernel[(triton.cdiv(rows, BLOCK),)](token_ids, sources, sampled, rows, BLOCK=BLOCK, num_warps=1)
