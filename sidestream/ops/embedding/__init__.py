"""Embeddings: rows of a table by token, once for each residual stream."""

from __future__ import annotations

import torch

from sidestream.ops.embedding import torch_impl
from sidestream.ops.operator import operator

__all__ = ["embed"]

embed = operator("embedding.embed", reads=("token_ids", "table"))(torch_impl.embed)


@embed.register("cuda")
def _embed(token_ids: torch.Tensor, table: torch.Tensor, *, copies: int) -> torch.Tensor:
    if token_ids.is_cuda:
        from sidestream.ops.embedding import triton_embed

        if triton_embed.takes(token_ids, table):
            return triton_embed.embed(token_ids, table, copies=copies)
    return torch_impl.embed(token_ids, table, copies=copies)
