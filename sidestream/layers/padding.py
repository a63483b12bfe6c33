"""Padding rows: what bodies that see true sizes hand back to code that sees padded ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x [T, D] -> [rows, D], zeros behind: finite, whatever comes next."""
    return x if x.shape[0] == rows else F.pad(x, (0, 0, 0, rows - x.shape[0]))
