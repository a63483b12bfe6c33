"""Embeddings in one Triton launch: a program takes some columns of a token's row and writes all its copies.

Floor at 4 copies of 4,096 bf16: 40 KB a token, so a launch up to 64 tokens, and 78 us at 8,192.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = 1024
COMPILED = not triton.knobs.runtime.interpret
"""Then launched while the kernel before ends (programmatic dependent launch); it waits before it reads."""


def takes(token_ids: torch.Tensor, table: torch.Tensor) -> bool:
    return token_ids.is_contiguous() and table.is_contiguous()


def embed(token_ids: torch.Tensor, table: torch.Tensor, *, copies: int) -> torch.Tensor:
    """As ``torch_impl.embed``, for what ``takes`` allows; a token that the table lacks gives NaN."""
    T, (vocab, hidden) = len(token_ids), table.shape
    out = torch.empty(T, copies, hidden, dtype=table.dtype, device=table.device)
    if T:
        _embed[(T, triton.cdiv(hidden, BLOCK))](
            token_ids, table, out, vocab, H=hidden, COPIES=copies, BLOCK=BLOCK, PDL=COMPILED, launch_pdl=COMPILED,
            num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["vocab"])  # type: ignore[untyped-decorator]
def _embed(
    token_ids: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    vocab: tl.tensor,
    H: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + row)
    known = (token >= 0) & (token < vocab)
    value = tl.load(table + token * H + column, mask=(column < H) & known, other=float("nan"))
    for copy in tl.static_range(COPIES):
        tl.store(out + (row * COPIES + copy) * H + column, value, mask=column < H)
