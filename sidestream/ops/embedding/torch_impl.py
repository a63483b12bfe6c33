"""Embeddings in torch: a look-up, then copies."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def embed(token_ids: torch.Tensor, table: torch.Tensor, *, copies: int) -> torch.Tensor:
    """Rows of the table.

    Args:
        token_ids: [T] int64 in [0, V).
        table: [V, H].
        copies: of each row, one beside the other: the streams that a residual begins with.
    Returns:
        [T, copies, H] in the dtype of the table, contiguous.
    """
    rows = F.embedding(token_ids, table).unsqueeze(1)
    return rows if copies == 1 else rows.expand(-1, copies, -1).contiguous()
