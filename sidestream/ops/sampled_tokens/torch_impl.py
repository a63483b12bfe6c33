"""Token ids that only the device knows yet, in three torch calls."""

from __future__ import annotations

import torch


def fill_sampled(token_ids: torch.Tensor, sources: torch.Tensor, sampled: torch.Tensor) -> None:
    """Replace placeholders by what the step before sampled.

    Args:
        token_ids: [T] int64, written where ``sources`` is not -1.
        sources: [T] int64, rows of ``sampled``, or -1.
        sampled: [S] int64.
    """
    found = sampled.index_select(0, sources.clamp_min(0))
    token_ids.copy_(torch.where(sources >= 0, found, token_ids))
