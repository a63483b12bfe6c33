"""The ranks that share a layer. Of size one today; every sharded class takes a group already."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sidestream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParallelGroup:
    """``size`` ranks that each hold an equal slice of a sharded dimension."""

    rank: int = 0
    size: int = 1

    def local(self, what: str, total: int) -> int:
        """This rank's share of ``total``; a ConfigError where it does not divide."""
        if total % self.size:
            raise ConfigError(f"{what} {total} does not divide over {self.size} tensor-parallel ranks")
        return total // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks."""
        assert self.size == 1, f"a group of {self.size} ranks has no transport yet"
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' slices of the last dimension, joined in rank order."""
        assert self.size == 1, f"a group of {self.size} ranks has no transport yet"
        return x


SINGLE = ParallelGroup()
