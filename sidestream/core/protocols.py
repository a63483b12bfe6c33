"""What layers call without importing it: attention and graph capture plug in through these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sidestream.core.batch import Chunk


class MLAttention(Protocol):
    """Latent attention of one step: writes this step's rows, then attends."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        latent: torch.Tensor,
        *,
        rope_key: torch.Tensor | None,
        asked: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with absorbed queries.

        Args:
            layer: index of the decoder layer.
            query: [S, H, r + p], the nope part already multiplied by W_UK; S is ``StepInputs.segment_rows``.
            latent: [S, r] normalised latents of this step's tokens.
            rope_key: [S, p], rotated where the model rotates; None if p == 0.
            asked: [N] int64 rows whose result somebody reads; None: all.
        Returns:
            [S, H, r] attention-weighted latents; zeros behind ``StepInputs.mixer_rows``. Or [N, H, r].
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


class Boundary(Protocol):
    """Static memory for tensors that cross an eager break: at one address in every replay, shared by all shapes."""

    def hold(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy ``tensor`` [rows, ..] to the buffer ``name``; the copy, of equal shape."""
        ...

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The first ``shape[0]`` rows of the buffer ``name``, for a break to write its result to."""
        ...


class LayerObserver(Protocol):
    """Looks at what each decoder layer puts out; for finding faults, never part of a normal run."""

    def see(self, layer: int, state: torch.Tensor) -> None:
        """Record something of the residual state [Tp, ..] behind decoder layer ``layer``.

        A graph may be recording the call, and its replays do not make it again: so work goes to the current stream,
        and results go to memory that was there before.
        """
        ...

    def end_step(self, chunks: Sequence[Chunk]) -> None:
        """All work of a step was issued to the current stream; its rows are those of ``chunks``, in order."""
        ...
