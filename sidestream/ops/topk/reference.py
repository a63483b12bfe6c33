"""Top-k by sorting each row in Python: the truth."""

from __future__ import annotations

import math

import torch


def topk_ascending(scores: torch.Tensor, valid: torch.Tensor, k: int) -> torch.Tensor:
    """[T, k] int32: the min(k, valid) highest, ties to the lowest index, ascending, -1 behind."""
    out = torch.full((scores.shape[0], k), -1, dtype=torch.int32)
    for t, row in enumerate(scores.tolist()):
        candidates = list(enumerate(row[: int(valid[t])]))
        # NaN below -inf: two-part keys, so that it compares at all.
        candidates.sort(key=lambda item: (0, 0.0, item[0]) if math.isnan(item[1]) else (-1, -item[1], item[0]))
        chosen = sorted(index for index, _ in candidates[:k])
        out[t, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return out
