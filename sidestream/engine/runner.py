"""Runs the model over a step's chunks: lays out inputs, opens the forward context, returns hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sidestream.attention.latent import PagedLatentAttention
from sidestream.attention.step_inputs import ROW_BUCKET, StepInputsBuilder
from sidestream.core.batch import Chunk
from sidestream.core.forward_context import ForwardContext, forward_context
from sidestream.core.layer_cache import LayerCache
from sidestream.engine.threads import step_threads
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
        weight_bytes: int,
    ) -> None:
        self._model = model
        self._caches = caches
        self._attention = attention
        self._builder = builder
        self._weight_bytes = weight_bytes

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
        with step_threads(inputs.num_tokens * self._weight_bytes), forward_context(context):
            return self._model.forward()

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits [S, vocab] fp32 of the given ascending rows; the GEMM runs on a whole bucket of rows."""
        count = len(rows)
        padding = -count % ROW_BUCKET
        if rows[0] == 0 and rows[-1] == count - 1 and hidden.shape[0] == count + padding:
            wanted = hidden  # every row of the step, as in most decodes
        else:
            index = torch.tensor([*rows, *[rows[0]] * padding], device=hidden.device)
            wanted = hidden.index_select(0, index)
        with step_threads(count * self._weight_bytes):
            return self._model.logits(wanted)[:count]
