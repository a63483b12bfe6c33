"""Index map: logical token positions to physical rows."""

from __future__ import annotations

import torch

from sidestream.ops.index_map import torch_impl
from sidestream.ops.operator import operator

__all__ = ["logical_to_physical"]

logical_to_physical = operator(
    "index_map.logical_to_physical",
    reads=("logical", "block_table", "token_rows"),
    writes=("out", "counts"),
    rows={"block_table": "token_rows"},
)(torch_impl.logical_to_physical)


@logical_to_physical.register("cuda")
def _logical_to_physical(
    logical: torch.Tensor,
    block_table: torch.Tensor,
    *,
    token_rows: torch.Tensor,
    block_size: int,
    out: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    if logical.is_cuda:
        from sidestream.ops.index_map import triton_map

        triton_map.logical_to_physical(
            logical, block_table, token_rows=token_rows, block_size=block_size, out=out, counts=counts
        )
        return
    torch_impl.logical_to_physical(
        logical, block_table, token_rows=token_rows, block_size=block_size, out=out, counts=counts
    )
