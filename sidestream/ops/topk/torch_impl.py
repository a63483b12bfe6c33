"""Deterministic top-k: an order in which no two entries are equal, so that no algorithm is left to decide ties."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

_SORT_ENTRIES = 1024
"""Scores up to which one stable sort is faster than building keys (on a CPU, where calls dominate)."""
NUMPY_ENTRIES = 1 << 15
"""Scores up to which numpy is faster than torch, on a CPU."""


def pick_ascending(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k best of each row, ties to the lowest index, in ascending index order.

    NaN ranks below everything, -0.0 equals 0.0. A caller hides an entry by making it NaN: as long as all entries
    behind it are hidden too, it is only picked when every visible one is.

    Args:
        scores: [T, N] fp32, N >= k.
    Returns:
        [T, k] int64.
    """
    size = scores.shape[1]
    if scores.device.type == "cpu" and scores.numel() <= NUMPY_ENTRIES:
        return torch.from_numpy(pick_ascending_numpy(scores.numpy(), k))
    if scores.numel() <= _SORT_ENTRIES:
        # Stable and ascending, NaN last: of the negated scores this is the order wanted.
        best = torch.sort(scores.neg(), dim=1, stable=True).indices[:, :k]
        return torch.sort(best, dim=1).values
    # Adding 0.0 folds -0.0; one NaN, with its sign set, maps below -inf in the next line's order of bit patterns.
    clean = (scores + 0.0).nan_to_num_(nan=-math.nan, posinf=math.inf, neginf=-math.inf).view(torch.int32)
    ordered = (clean >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(clean)
    lowest_first = torch.arange(size - 1, -1, -1, device=scores.device)
    key = torch.add(lowest_first, ordered, alpha=1 << 32)
    best = torch.topk(key, k, dim=1, sorted=False).indices
    return torch.sort(best, dim=1).values


def pick_ascending_numpy(scores: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
    """``pick_ascending`` of an array."""
    size = scores.shape[1]
    if scores.size <= _SORT_ENTRIES:
        best = np.negative(scores).argsort(axis=1, kind="stable")[:, :k]
    else:
        clean = np.add(scores, np.float32(0.0)).view(np.int32)
        np.copyto(clean, -1, where=np.isnan(scores))
        ordered = (clean >> 31) & 0x7FFFFFFF
        ordered ^= clean
        key = ordered.astype(np.int64)
        key <<= 32
        key += np.arange(size - 1, -1, -1)
        best = key.argpartition(size - k, axis=1)[:, size - k :]
    return np.sort(best, axis=1)


def topk_ascending(scores: torch.Tensor, valid: torch.Tensor, k: int) -> torch.Tensor:
    """Select the highest of each row's first ``valid`` scores.

    Args:
        scores: [T, N] fp32, finite or not; NaN ranks below -inf.
        valid: [T] int64, entries of the row that count; the others are never selected, whatever they hold.
        k: entries to select, may be larger than N.
    Returns:
        [T, k] int32: the indices of the ``min(k, valid)`` highest, ties to the lowest index, in ascending order, -1
        behind them. The same input gives the same output, whatever the other rows hold.
    """
    rows, size = scores.shape
    width = min(k, size)
    if width == 0:
        return torch.full((rows, k), -1, dtype=torch.int32, device=scores.device)
    limit = valid[:, None]
    hidden = torch.arange(size, device=scores.device) >= limit
    best = pick_ascending(torch.where(hidden, math.nan, scores), width)
    picked = best.masked_fill_(best >= limit, -1).to(torch.int32)
    if width < k:
        picked = torch.nn.functional.pad(picked, (0, k - width), value=-1)
    return picked
