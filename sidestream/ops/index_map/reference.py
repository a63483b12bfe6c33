"""The index map entry by entry: the truth."""

from __future__ import annotations

import torch


def logical_to_physical(
    logical: torch.Tensor,
    block_table: torch.Tensor,
    *,
    token_rows: torch.Tensor,
    block_size: int,
    out: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """As the fast path."""
    for t in range(logical.shape[0]):
        counts[t] = 0
        for i in range(logical.shape[1]):
            position = int(logical[t, i])
            if position < 0:
                out[t, i] = -1
                continue
            page = int(block_table[int(token_rows[t]), position // block_size])
            out[t, i] = page * block_size + position % block_size
            counts[t] += 1
