"""What layers call without importing it: the attention side plugs in through these."""

from __future__ import annotations

from typing import Protocol

import torch


class MLAttention(Protocol):
    """Latent attention of one step: writes this step's rows, then attends."""

    def attend(
        self, layer: int, query: torch.Tensor, latent: torch.Tensor, *, rope_key: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend with absorbed queries.

        Args:
            layer: index of the decoder layer.
            query: [T, H, r + p], the nope part already multiplied by W_UK.
            latent: [T, r] normalised latents of this step's tokens.
            rope_key: [T, p], rotated where the model rotates; None if p == 0.
        Returns:
            [T, H, r] attention-weighted latents.
        """
        ...


class IndexSink(Protocol):
    """Where a leader's indexer puts its selection."""

    def logical_topk_indices(self, layer: int) -> torch.Tensor:
        """[T, W] int32 buffer of the leader ``layer`` for this step, to be written whole."""
        ...

    def set_logical_topk_ready(self, layer: int) -> None:
        """Publish the buffer: everything that fills it has been issued."""
        ...
