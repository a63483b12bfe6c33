"""Embeddings token by token: the truth."""

from __future__ import annotations

import torch


def embed(token_ids: torch.Tensor, table: torch.Tensor, *, copies: int) -> torch.Tensor:
    """See ``torch_impl.embed``."""
    out = torch.empty(len(token_ids), copies, table.shape[1], dtype=table.dtype)
    for row, token in enumerate(token_ids.tolist()):
        out[row] = table[token]
    return out
