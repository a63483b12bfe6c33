"""Sparse MLA: absorbed latent attention over the rows that an indexer selected."""

from __future__ import annotations

import torch

from sidestream.ops.kv_rows.layout import KVRowLayout
from sidestream.ops.operator import operator
from sidestream.ops.sparse_mla import torch_impl

__all__ = ["sparse_mla"]

sparse_mla = operator("sparse_mla.sparse_mla", reads=("q", "pool", "rows", "counts"), rows={"pool": "rows"})(
    torch_impl.sparse_mla
)


@sparse_mla.register("cuda")
def _on_cuda(
    q: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    *,
    counts: torch.Tensor,
    scale: float,
    layout: KVRowLayout,
    with_lse: bool = True,
    scratch_bytes: int | None = None,
    out_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    from sidestream.ops.sparse_mla import triton_impl  # not before a tensor needs it: engines on a CPU have no Triton

    return triton_impl.sparse_mla(
        q,
        pool,
        rows,
        counts=counts,
        scale=scale,
        layout=layout,
        with_lse=with_lse,
        scratch_bytes=scratch_bytes,
        out_rows=out_rows,
    )
