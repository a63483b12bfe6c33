"""A tensor, or one rank's slice of it, seen as a rectangle of rows and columns of what is stored."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sidestream.weights.source import Shard, full_shape


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Rows ``[row_start, row_stop)`` and columns ``[col_start, col_stop)`` of a tensor stored as rows of ``cols``."""

    cols: int
    row_start: int
    row_stop: int
    col_start: int
    col_stop: int

    @property
    def num_rows(self) -> int:
        return self.row_stop - self.row_start

    @property
    def num_cols(self) -> int:
        return self.col_stop - self.col_start


def whole(shape: tuple[int, ...]) -> RowSlice:
    """All of a tensor: rows are its first dimension, or there is one row if that is its only one."""
    rows, cols = (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))
    return RowSlice(cols, 0, rows, 0, cols)


def row_slice(out: torch.Tensor, shard: Shard | None) -> tuple[RowSlice, torch.Tensor]:
    """What to read for the destination ``out``, and a view of ``out`` [num_rows, num_cols] for it."""
    shape = full_shape(out, shard)
    dim = 0 if shard is None else shard.dim
    start = 0 if shard is None else shard.rank * out.shape[dim]
    if out.dim() < 2:
        piece = RowSlice(math.prod(shape), 0, 1, start, start + out.numel())
        view = out.reshape(1, -1) if out.dim() == 0 else out.unsqueeze(0)
    elif dim == 0:
        inner = math.prod(shape[1:])
        piece = RowSlice(inner, start, start + out.shape[0], 0, inner)
        view = out.flatten(1)
    else:
        inner = math.prod(shape[dim + 1 :])
        view = out.flatten(0, dim - 1).flatten(1)
        piece = RowSlice(shape[dim] * inner, 0, len(view), start * inner, (start + out.shape[dim]) * inner)
    assert view.data_ptr() == out.data_ptr(), f"a destination of strides {out.stride()} has no view as rows"
    return piece, view
