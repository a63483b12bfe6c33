"""Where weights come from, pull-style: a layer under construction asks for each of its tensors by canonical name.

Canonical names are the text model's own in hub spelling: ``model.embed_tokens.weight``,
``model.layers.3.mlp.experts.7.gate_proj.weight``, ``model.norm.weight``, ``lm_head.weight``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """The ``rank``-th of ``size`` equal slices of dimension ``dim``; bounds need not meet fp8 block bounds."""

    dim: int
    rank: int
    size: int

    def __post_init__(self) -> None:
        assert self.dim >= 0, f"no such slice: {self}"
        assert 0 <= self.rank < self.size, f"no such slice: {self}"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What became of a checkpoint's tensors.

    Attributes:
        loaded: canonical names that were asked for and filled, in that order.
        unexpected: the checkpoint's own names that no layer asked for.
        skipped: the checkpoint's own names that are left out on purpose, with the reason.
    """

    loaded: tuple[str, ...]
    unexpected: tuple[str, ...]
    skipped: Mapping[str, str]


class WeightSource(Protocol):
    def load(self, name: str, out: torch.Tensor, *, shard: Shard | None = None) -> None:
        """Fill ``out`` with a tensor, or with a slice of it.

        Args:
            name: canonical name.
            out: destination of any float dtype and device, possibly a strided view into a merged parameter. Its
                shape is the local one: the tensor's own shape with dimension ``shard.dim`` divided by
                ``shard.size``; dimensions of size 1 may be there or not.
        Raises:
            CheckpointError: the stored tensor has another shape or cannot be read. A tensor that is not there
                leaves ``out`` as it is and is named by ``finish``.
        """
        ...

    def finish(self) -> LoadReport:
        """To be called once, when every layer has its tensors.

        Raises:
            CheckpointError: naming every tensor that was asked for and is missing.
        """
        ...


def full_shape(out: torch.Tensor, shard: Shard | None) -> tuple[int, ...]:
    """The whole tensor's shape, given the local destination."""
    if shard is None:
        return tuple(out.shape)
    assert shard.dim < out.dim(), f"dimension {shard.dim} of a tensor of shape {tuple(out.shape)}"
    return tuple(n * shard.size if d == shard.dim else n for d, n in enumerate(out.shape))
