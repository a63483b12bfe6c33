"""Runs the model over a step's chunks: lays out inputs, opens the forward context, returns hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sidestream.attention.latent import PagedLatentAttention
from sidestream.attention.step_inputs import ROW_BUCKET, StepInputsBuilder
from sidestream.core.batch import Chunk
from sidestream.core.forward_context import ForwardContext, forward_context
from sidestream.core.layer_cache import LayerCache
from sidestream.models.decoder import DecoderModel


class ModelRunner:
    """A model with its caches; knows nothing of requests."""

    def __init__(
        self,
        model: DecoderModel,
        *,
        caches: tuple[LayerCache, ...],
        attention: PagedLatentAttention,
        builder: StepInputsBuilder,
    ) -> None:
        self._model = model
        self._caches = caches
        self._attention = attention
        self._builder = builder

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence[int]) -> torch.Tensor:
        """Run one step.

        Args:
            chunks: decodes first.
            token_ids: of all chunks, in order.
        Returns:
            [Tp, hidden] normalised hidden states; rows beyond the step's tokens are padding.
        """
        inputs = self._builder.build(chunks, token_ids)
        self._attention.begin_step(inputs.num_tokens)
        context = ForwardContext(
            inputs=inputs, caches=self._caches, attention=self._attention, index_sink=self._attention
        )
        with forward_context(context):
            return self._model.forward()

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits [S, vocab] fp32 of the given ascending rows; the GEMM runs on a whole bucket of rows."""
        count = len(rows)
        padding = -count % ROW_BUCKET
        if rows[0] == 0 and rows[-1] == count - 1 and hidden.shape[0] == count + padding:
            return self._model.logits(hidden)[:count]  # every row of the step, as in most decodes
        index = torch.tensor([*rows, *[rows[0]] * padding], device=hidden.device)
        return self._model.logits(hidden.index_select(0, index))[:count]
