"""Triton index map: some programs a row, and the one that holds the last valid entry writes the count."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@dataclass(frozen=True, slots=True)
class MapPlan:
    """Launch parameters.

    Attributes:
        block: entries a program.
        pdl: launch while the kernel before still runs (programmatic dependent launch), and wait for it there.
    """

    block: int
    warps: int
    pdl: bool = False


DEFAULT_PLAN = MapPlan(block=256, warps=4)


@triton.jit(
    do_not_specialize=["table_row"], do_not_specialize_on_alignment=["logical", "table", "token_rows", "out", "counts"]
)
def _map_kernel(
    logical, table, token_rows, out, counts,
    logical_row, logical_col, table_row, table_col, token_stride, out_row, out_col, counts_stride, width,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    table += tl.load(token_rows + token * token_stride) * table_row
    logical += token * logical_row
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    column = start + tl.arange(0, BLOCK)
    inside = column < width
    position = tl.load(logical + column.to(tl.int64) * logical_col, mask=inside, other=-1)
    end = start + BLOCK
    behind = tl.load(logical + end.to(tl.int64) * logical_col, mask=end < width, other=-1)
    valid = position >= 0
    page = tl.load(table + (position // BLOCK_SIZE) * table_col, mask=valid, other=0)
    row = page.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(out + token * out_row + column.to(tl.int64) * out_col, tl.where(valid, row, -1), mask=inside)
    # Valid entries are a prefix: it ends here if this program has some and the next has none.
    found = tl.sum(valid.to(tl.int32), axis=0)
    ends_here = ((found > 0) & (behind < 0)) | ((found == 0) & (start == 0))
    tl.store(counts + token * counts_stride, start + found, mask=ends_here)


def logical_to_physical(
    logical: torch.Tensor,
    block_table: torch.Tensor,
    *,
    token_rows: torch.Tensor,
    block_size: int,
    out: torch.Tensor,
    counts: torch.Tensor,
    plan: MapPlan = DEFAULT_PLAN,
) -> None:
    """As ``torch_impl.logical_to_physical``; a padding token's row of the block table is not read."""
    tokens, width = logical.shape
    if tokens == 0:
        return
    if width == 0:
        counts.zero_()
        return
    _map_kernel[tokens, triton.cdiv(width, plan.block)](
        logical, block_table, token_rows, out, counts,
        *logical.stride(), *block_table.stride(), token_rows.stride(0), *out.stride(), counts.stride(0), width,
        BLOCK_SIZE=block_size, BLOCK=plan.block, PDL=plan.pdl, launch_pdl=plan.pdl, num_warps=plan.warps,
    )  # fmt: skip
