"""Linear layers: several projections of one input merged into one GEMM, and the row-parallel one that ends a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sidestream.layers.loader import LayerLoader


@dataclass(frozen=True, slots=True)
class Projection:
    """One checkpoint weight ``name`` [out_features, in] inside a merged linear."""

    name: str
    out_features: int
    sharded: bool = True
    """Split over the ranks by output rows; False keeps it whole on every rank (an indexer's, for example)."""
    bias: bool = False
    suffix: str = ".weight"
    """What the checkpoint appends to ``name`` for the weight; a few bare parameters append nothing."""


class MergedLinear:
    """y = x W^T + b for several projections of the same input, computed as one GEMM and returned apart.

    Args:
        loader: at the module that holds the projections.
        in_features: width of x.
        projections: in output order.
    """

    def __init__(self, loader: LayerLoader, in_features: int, projections: Sequence[Projection]) -> None:
        group = loader.group
        self.sizes = [group.local(p.name, p.out_features) if p.sharded else p.out_features for p in projections]
        self.weight = loader.format.empty(sum(self.sizes), in_features)
        self.bias = (
            torch.zeros(sum(self.sizes), dtype=loader.dtype, device=loader.device)
            if any(p.bias for p in projections)
            else None
        )
        start = 0
        for projection, size in zip(projections, self.sizes, strict=True):
            shard = loader.shard(0) if projection.sharded else None
            name = loader.prefix + projection.name
            self.weight.load_rows(loader.source, name + projection.suffix, start, start + size, shard=shard)
            if projection.bias:
                assert self.bias is not None
                loader.source.load(f"{name}.bias", self.bias[start : start + size], shard=shard)
            start += size

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [T, in] -> one [T, size] view a projection."""
        return torch.split(self.weight.linear(x, self.bias), self.sizes, dim=-1)


class RowLinear:
    """One projection, input columns split over the ranks; the ranks' partial results are summed."""

    def __init__(self, loader: LayerLoader, name: str, in_features: int, out_features: int, *, bias: bool = False):
        self.group = loader.group
        self.weight = loader.format.empty(out_features, self.group.local(name, in_features))
        self.weight.load_rows(loader.source, f"{loader.prefix}{name}.weight", 0, out_features, shard=loader.shard(1))
        self.bias = loader.tensor(f"{name}.bias", (out_features,)) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in / ranks] -> [T, out], the bias added once."""
        if self.group.size == 1:
            return self.weight.linear(x, self.bias)
        out = self.group.all_reduce(self.weight.linear(x, None))
        return out if self.bias is None else out + self.bias
