"""How a linear's weight is kept and multiplied: an object, so that a kept-quantised form is one more class here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sidestream.ops.linear import linear
from sidestream.weights import Shard, WeightSource


class LinearWeight(Protocol):
    """A [rows, cols] weight under construction and in use."""

    def load_rows(self, source: WeightSource, name: str, start: int, stop: int, *, shard: Shard | None) -> None:
        """Fill rows [start, stop) from the checkpoint tensor ``name``, sliced by ``shard``."""
        ...

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, cols] -> [T, rows]."""
        ...


class WeightFormat(Protocol):
    def empty(self, rows: int, cols: int) -> LinearWeight: ...


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """One plain tensor [rows, cols]; fp8 block weights are dequantised into it while loading."""

    tensor: torch.Tensor

    def load_rows(self, source: WeightSource, name: str, start: int, stop: int, *, shard: Shard | None) -> None:
        source.load(name, self.tensor[start:stop], shard=shard)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(x, self.tensor, bias)


@dataclass(frozen=True, slots=True)
class DenseFormat:
    dtype: torch.dtype
    device: torch.device

    def empty(self, rows: int, cols: int) -> LinearWeight:
        return DenseWeight(torch.empty(rows, cols, dtype=self.dtype, device=self.device))
