"""KV rows: how a token's latent and rope key are stored in a paged pool."""

from __future__ import annotations

import torch

from sidestream.ops.kv_rows.layout import KV_ROW_LAYOUTS, KVRowLayout, kv_row_layout, pack_rows, unpack_rows
from sidestream.ops.operator import operator

__all__ = ["KV_ROW_LAYOUTS", "KVRowLayout", "kv_row_layout", "pack_rows", "unpack_rows", "write_rows"]


@operator("kv_rows.write_rows", reads=("rows_index", "latent", "rope"), writes=("pool",), rows={"pool": "rows_index"})
def write_rows(
    pool: torch.Tensor,
    rows_index: torch.Tensor,
    latent: torch.Tensor,
    *,
    rope: torch.Tensor | None,
    layout: KVRowLayout,
) -> None:
    """Pack tokens into pool rows.

    Args:
        pool: [N, row_elems] of ``layout.dtype``, written at ``rows_index`` only.
        rows_index: [T] int64. A row named twice (the scratch row of padding tokens) keeps one of its tokens.
        latent: [T, r] float.
        rope: [T, p] float, None exactly where p is 0.
    """
    pool.index_copy_(0, rows_index, pack_rows(latent, rope, layout))


@write_rows.register("cuda")
def _write_on_cuda(
    pool: torch.Tensor,
    rows_index: torch.Tensor,
    latent: torch.Tensor,
    *,
    rope: torch.Tensor | None,
    layout: KVRowLayout,
) -> None:
    from sidestream.ops.kv_rows import triton_write  # not before a tensor needs it: engines on a CPU have no Triton

    triton_write.write_rows(pool, rows_index, latent, rope=rope, layout=layout)
