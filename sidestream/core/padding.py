"""Padding rows: what bodies that see true sizes hand back to code that sees padded ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def true_rows(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """The first ``tokens`` rows of x [Tp, ..]; x itself where there are no others."""
    return x if x.shape[0] == tokens else x[:tokens]


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x [T, ..] -> [rows, ..], zeros behind: finite, whatever comes next."""
    return x if x.shape[0] == rows else F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows - x.shape[0]))
