"""Hands a layer its tensors while it is constructed, so that a layer is complete once it exists."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sidestream.layers.parallel import ParallelGroup
from sidestream.layers.weight_format import WeightFormat
from sidestream.weights import Shard, WeightSource


@dataclass(frozen=True, slots=True)
class LayerLoader:
    """A weight source, seen from one place in the module tree.

    Attributes:
        prefix: canonical name so far, with the trailing dot.
        dtype, device: of ordinary tensors.
        format: how linear weights are kept.
        group: ranks that share the model.
    """

    source: WeightSource
    prefix: str
    dtype: torch.dtype
    device: torch.device
    format: WeightFormat
    group: ParallelGroup

    def at(self, name: str) -> LayerLoader:
        """The loader of the submodule ``name``."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def tensor(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None, shard: Shard | None = None
    ) -> torch.Tensor:
        """Load ``prefix + name`` into new memory of the local ``shape``."""
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.source.load(self.prefix + name, out, shard=shard)
        return out

    def shard(self, dim: int) -> Shard | None:
        """This rank's slice of a sharded dimension; None when there is one rank."""
        return None if self.group.size == 1 else Shard(dim, self.group.rank, self.group.size)
