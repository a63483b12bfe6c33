"""Sparse MLA: absorbed latent attention over the rows that an indexer selected."""

from __future__ import annotations

from sidestream.ops.operator import operator
from sidestream.ops.sparse_mla import torch_impl

__all__ = ["sparse_mla"]

sparse_mla = operator("sparse_mla.sparse_mla", reads=("q", "pool", "rows", "counts"), rows={"pool": "rows"})(
    torch_impl.sparse_mla
)
