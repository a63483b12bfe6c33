"""Runs the model over a step's chunks: lays out inputs, opens the forward context, returns hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from sidestream.attention.latent import PagedLatentAttention
from sidestream.attention.step_inputs import ROW_BUCKET, StepInputsBuilder
from sidestream.core.batch import Chunk
from sidestream.core.cudagraph_mode import CUDAGraphMode
from sidestream.core.forward_context import ForwardContext, forward_context
from sidestream.core.layer_cache import LayerCache
from sidestream.core.protocols import LayerObserver
from sidestream.core.step_inputs import StepInputs
from sidestream.engine.threads import step_threads
from sidestream.graphs.dispatch import GraphDispatcher, StepPlan
from sidestream.graphs.runner import GraphRunner
from sidestream.models.decoder import DecoderModel
from sidestream.streams import Streams


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """What a device that captures adds: the choice of a mode for each step, and the graphs."""

    dispatcher: GraphDispatcher
    runner: GraphRunner


class ModelRunner:
    """A model with its caches; knows nothing of requests.

    Args:
        graphs: None on a CPU, where steps run as they are.
        observer: sees what each decoder layer puts out, in every mode.

    Attributes:
        streams: of the device; work on what a step returns belongs on ``streams.compute`` (see ``on_device``).
        attention: with its index groups, for reports.
        graphs: for reports: steps by mode, fallbacks by reason.
    """

    def __init__(
        self,
        model: DecoderModel,
        *,
        caches: tuple[LayerCache, ...],
        attention: PagedLatentAttention,
        builder: StepInputsBuilder,
        streams: Streams,
        graphs: StepGraphs | None,
        weight_bytes: int,
        observer: LayerObserver | None = None,
    ) -> None:
        self._model = model
        self._caches = caches
        self.attention = attention
        self._builder = builder
        self._weight_bytes = weight_bytes
        self._observer = observer
        self.streams = streams
        self.graphs = graphs

    def on_device(self) -> AbstractContextManager[None]:
        """Issue the block's work to the compute stream."""
        return self.streams.backend.use(self.streams.compute)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence[int]) -> torch.Tensor:
        """Run one step, on the current stream.

        Args:
            chunks: decodes first.
            token_ids: of all chunks, in order.
        Returns:
            [Tp, hidden] normalised hidden states, valid until the next step; rows beyond its tokens are padding.
        """
        self.streams.begin_step()
        hidden = self._forward(chunks, token_ids)
        if self._observer is not None:
            self._observer.end_step(chunks)
        return hidden

    def _forward(self, chunks: Sequence[Chunk], token_ids: Sequence[int]) -> torch.Tensor:
        if self.graphs is None:
            inputs = self._builder.build(chunks, token_ids)
            with step_threads(inputs.num_tokens * self._weight_bytes), self._context(inputs, CUDAGraphMode.NONE):
                return self._model.forward()
        tokens, uniform = len(token_ids), all(chunk.is_decode and chunk.length == 1 for chunk in chunks)
        plan = self.graphs.dispatcher.plan(tokens, uniform=uniform)
        build = self._builder.build_uniform if uniform else self._builder.build
        inputs = build(chunks, token_ids, rows=plan.key.tokens)
        with self._context(inputs, plan.mode):
            if plan.mode is CUDAGraphMode.NONE:
                return self._model.forward()
            return self.graphs.runner.replay(plan, inputs)

    @torch.inference_mode()
    def capture(self, on_captured: Callable[[StepPlan], None] | None = None) -> None:
        """Capture every shape that the dispatcher names, largest first, on scratch blocks and slots and on the current
        stream. Each is run once without a graph before.

        Args:
            on_captured: told of each shape when it is done.
        """
        if self.graphs is None:
            return
        runner = self.graphs.runner
        for plan in self.graphs.dispatcher.captures():
            inputs = self._scratch(plan)
            with self._context(inputs, plan.mode, buffers=True):
                runner.warm_up(self._model.forward)
            inputs = self._scratch(plan)
            with self._context(inputs, plan.mode, buffers=True):
                runner.capture(plan, self._model.forward, inputs)
            if on_captured is not None:
                on_captured(plan)

    def _scratch(self, plan: StepPlan) -> StepInputs:
        self.streams.begin_step()
        return self._builder.scratch(rows=plan.key.tokens, uniform=plan.key.uniform)

    def _context(
        self, inputs: StepInputs, mode: CUDAGraphMode, *, buffers: bool = False
    ) -> AbstractContextManager[ForwardContext]:
        self.attention.begin_step(inputs.mixer_rows)
        pieces = buffers and mode is CUDAGraphMode.PIECEWISE and self.graphs is not None
        return forward_context(
            ForwardContext(
                inputs=inputs,
                caches=self._caches,
                attention=self.attention,
                index_sink=self.attention,
                mode=mode,
                boundary=self.graphs.runner.buffers if pieces and self.graphs is not None else None,
                observer=self._observer,
            )
        )

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
        if self.graphs is not None:
            return self._model.logits(wanted)[:count]
        with step_threads(count * self._weight_bytes):
            return self._model.logits(wanted)[:count]
