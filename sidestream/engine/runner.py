"""Runs the model over a step's chunks: lays out inputs, opens the forward context, returns what can be sampled from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from sidestream.attention.latent import PagedLatentAttention
from sidestream.attention.step_inputs import ROW_BUCKET, StepInputsBuilder
from sidestream.cache.hisparse import HiSparseRuntime
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
from sidestream.ops.sampled_tokens import fill_sampled
from sidestream.streams import Streams
from sidestream.streams.upload import PackedUpload

ASKED_FROM = 1024
"""Steps of more tokens have no row in their last layer that nobody asks for. Others, and all that a graph may hold,
compute every row in every mode, so that modes give the same bits."""


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """What a device that captures adds.

    Attributes:
        dispatcher: chooses a mode for each step.
        runner: of the graphs.
        logit_rows: brings row numbers to the device.
    """

    dispatcher: GraphDispatcher
    runner: GraphRunner
    logit_rows: PackedUpload


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gives; valid until the next one.

    Attributes:
        hidden: [Tp, hidden] normalised hidden states; rows beyond the step's tokens are padding. With ``rows``, of
            those of the step alone, padding behind them too.
        logits: [Tp, vocab] fp32 of all rows, where the step computed them: in every uniform decode on a device that
            captures, so that the head is part of the graph.
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    rows: tuple[int, ...] | None = None


class ModelRunner:
    """A model with its caches; knows nothing of requests.

    Args:
        graphs: None on a CPU, where steps run as they are.
        observer: sees what each decoder layer puts out, in every mode.

    Attributes:
        streams: of the device; work on what a step returns belongs on ``streams.compute`` (see ``on_device``).
        attention: with its index groups, for reports.
        graphs: for reports: fallbacks by reason.
        hisparse: None where all KV rows stay on the device.
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
        hisparse: HiSparseRuntime | None = None,
    ) -> None:
        self._model = model
        self._caches = caches
        self.attention = attention
        self._builder = builder
        self._weight_bytes = weight_bytes
        self._observer = observer
        self.streams = streams
        self.graphs = graphs
        self._plain_steps: Counter[CUDAGraphMode] = Counter()
        self.hisparse = hisparse

    @property
    def steps(self) -> Counter[CUDAGraphMode]:
        """How many steps ran in each mode."""
        return self._plain_steps if self.graphs is None else self.graphs.dispatcher.steps

    def on_device(self) -> AbstractContextManager[None]:
        """Issue the block's work to the compute stream."""
        return self.streams.backend.use(self.streams.compute)

    def settle(self) -> None:
        """Wait until the device is idle: after a failed step a side stream may be at work that nothing waits for."""
        self.streams.backend.synchronize()

    @torch.inference_mode()
    def forward(
        self,
        chunks: Sequence[Chunk],
        token_ids: Sequence[int],
        *,
        sources: Sequence[int] | None = None,
        sampled: torch.Tensor | None = None,
        asked: Sequence[int] | None = None,
    ) -> StepOutput:
        """Run one step, on the current stream.

        Args:
            chunks: decodes first.
            token_ids: of all chunks, in order.
            sources: for each token the row of ``sampled`` that holds it, or -1 where ``token_ids`` does; None if all
                are known.
            sampled: [S] int64 on the device.
            asked: ascending rows whose hidden states somebody will read, at least one; None: perhaps any. Long steps
                compute no others where only the last layer's output would show them.
        """
        self.streams.begin_step()
        if self.hisparse is None:
            return self._step(chunks, token_ids, sources, sampled, asked)
        self.hisparse.begin_step(chunks)
        output = self._step(chunks, token_ids, sources, sampled, asked)
        self.hisparse.end_step()
        return output

    def _step(
        self,
        chunks: Sequence[Chunk],
        token_ids: Sequence[int],
        sources: Sequence[int] | None,
        sampled: torch.Tensor | None,
        asked: Sequence[int] | None,
    ) -> StepOutput:
        if self.graphs is None:
            self._plain_steps[CUDAGraphMode.NONE] += 1
            inputs = self._builder.build(chunks, token_ids)
            with step_threads(inputs.num_tokens * self._weight_bytes), self._context(inputs, CUDAGraphMode.NONE):
                output = StepOutput(self._model.forward())
            return self._observed(output, chunks)
        tokens, uniform = len(token_ids), all(chunk.is_decode and chunk.length == 1 for chunk in chunks)
        plan = self.graphs.dispatcher.plan(tokens, uniform=uniform)
        build = self._builder.build_uniform if uniform else self._builder.build
        inputs = build(chunks, token_ids, rows=plan.key.tokens, sources=sources)
        if inputs.sources is not None:
            assert sampled is not None, "token ids are unknown, and nothing was sampled"
            fill_sampled(inputs.token_ids, inputs.sources, sampled)
        if uniform or self._observer is not None or tokens <= max(ASKED_FROM, self.graphs.dispatcher.largest_mixed):
            asked = None
        rows = None if asked is None else self._rows(_whole_bucket(asked), inputs.token_ids.device)
        with self._context(inputs, plan.mode, asked=rows):
            output = StepOutput(**self._run(plan, inputs), rows=None if asked is None else tuple(asked))
        return self._observed(output, chunks)

    def _observed(self, output: StepOutput, chunks: Sequence[Chunk]) -> StepOutput:
        if self._observer is not None:
            self._observer.end_step(chunks)
        return output

    def _run(self, plan: StepPlan, inputs: StepInputs) -> Mapping[str, torch.Tensor]:
        if plan.mode is CUDAGraphMode.NONE:
            return self._forward_of(plan, placed=False)()
        assert self.graphs is not None
        return self.graphs.runner.replay(plan, inputs)

    def _forward_of(self, plan: StepPlan, *, placed: bool = True) -> Callable[[], dict[str, torch.Tensor]]:
        """What a step of this form computes: logits too, if every row of it is sampled from, in the graphs' memory for
        results if ``placed``."""

        def forward() -> dict[str, torch.Tensor]:
            hidden = self._model.forward()
            if not plan.key.uniform:
                return {"hidden": hidden}
            out = None
            if placed and self.graphs is not None:
                shape = (hidden.shape[0], self._model.config.vocab_size)
                out = self.graphs.runner.place("logits", shape, torch.float32)
            return {"hidden": hidden, "logits": self._model.logits(hidden, out=out)}

        return forward

    @torch.inference_mode()
    def capture(
        self, on_captured: Callable[[StepPlan], None] | None = None, *, shapes: Sequence[StepPlan] | None = None
    ) -> None:
        """Capture every shape that the dispatcher names, largest first, on scratch blocks and slots and on the current
        stream. Each is run once without a graph before.

        Args:
            on_captured: told of each shape when it is done.
            shapes: some of them, in that order; None is all.
        """
        if self.graphs is None:
            return
        runner = self.graphs.runner
        for plan in self.graphs.dispatcher.captures() if shapes is None else shapes:
            inputs = self._scratch(plan)
            with self._context(inputs, plan.mode, buffers=True):
                runner.warm_up(self._forward_of(plan))
            inputs = self._scratch(plan)
            with self._context(inputs, plan.mode, buffers=True):
                runner.capture(plan, self._forward_of(plan), inputs)
            if on_captured is not None:
                on_captured(plan)

    def _scratch(self, plan: StepPlan) -> StepInputs:
        assert self.graphs is not None
        self.streams.begin_step()
        rows, longest = plan.key.tokens, max(self._builder.max_model_len, 1)
        sequences = 1 + -(-(rows - 1) // longest)
        fits = sequences <= self.graphs.dispatcher.decode_sizes[-1]  # else no batch of that size holds a decode
        return self._builder.scratch(rows=rows, uniform=plan.key.uniform, decode=fits)

    def _context(
        self, inputs: StepInputs, mode: CUDAGraphMode, *, buffers: bool = False, asked: torch.Tensor | None = None
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
                asked=asked,
            )
        )

    @torch.inference_mode()
    def logits(self, output: StepOutput, rows: Sequence[int]) -> torch.Tensor:
        """Logits [S, vocab] fp32 of the given ascending rows, which were asked for; the GEMM runs on a whole bucket of
        rows."""
        count, hidden = len(rows), output.hidden
        if output.rows is not None:
            places = {row: place for place, row in enumerate(output.rows)}
            assert places.keys() >= set(rows), f"rows {set(rows) - places.keys()} were not asked for"
            rows = [places[row] for row in rows]
        every = rows[0] == 0 and rows[-1] == count - 1
        if output.logits is not None:
            return output.logits[:count] if every else output.logits.index_select(0, self._rows(rows, hidden.device))
        padding = -count % ROW_BUCKET
        if not (every and hidden.shape[0] == count + padding):  # otherwise every row of the step, as in most decodes
            hidden = hidden.index_select(0, self._rows(_whole_bucket(rows), hidden.device))
        if self.graphs is not None:
            return self._model.logits(hidden)[:count]
        with step_threads(count * self._weight_bytes):
            return self._model.logits(hidden)[:count]

    def _rows(self, rows: Sequence[int], device: torch.device) -> torch.Tensor:
        if self.graphs is None:
            return torch.tensor(rows, device=device)
        (placed,) = self.graphs.logit_rows.place([np.array(rows, dtype=np.int64)])
        return placed


def _whole_bucket(rows: Sequence[int]) -> list[int]:
    """The rows, and the first of them until there is a whole bucket."""
    return [*rows, *[rows[0]] * (-len(rows) % ROW_BUCKET)]
