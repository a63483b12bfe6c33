"""Row copies one by one: the truth."""

from __future__ import annotations

import torch


def copy_rows(
    pool: torch.Tensor,
    host: torch.Tensor,
    *,
    to: torch.Tensor,
    source: torch.Tensor,
    counts: torch.Tensor,
    spare: tuple[int, int],
) -> None:
    """As the fast path."""
    for r in range(to.shape[0]):
        for i in range(int(counts[r])):
            pool[int(to[r, i])] = host[int(source[r, i])]
