"""Index groups: a leader's top-k and the followers that reuse it, turned into physical rows once a step.

The leader's indexer writes ``logical_topk_indices`` (token positions of its own sequence) on the compute stream and
publishes them. The first layer of the group that attends has them resolved to physical rows of the KV pools on the
side stream, which waits for the publish alone and so runs beside whatever the compute stream was given behind it; the
followers find the rows done. Two handoffs a group hold the order, the same in every capture mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sidestream.core.step_inputs import StepInputs
from sidestream.errors import ConfigError
from sidestream.ops.index_map import logical_to_physical
from sidestream.streams import Handoff, Stream, Streams


class TopKResolver(Protocol):
    """Maps token positions to KV rows."""

    def resolve(
        self, logical: torch.Tensor, inputs: StepInputs, *, physical: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Fill ``physical`` [T, W] int64 (-1 = none, valid prefix) and ``counts`` [T] int32 from ``logical`` [T, W].

        Work goes to the current stream: the group's side stream, or the compute stream of an inline step. What it
        reads was issued before the leader's publish, or lives as long as the engine.
        """
        ...


class RowFetcher(Protocol):
    """Brings rows to the device that a layer's pool lacks, for resolvers that select such rows."""

    @property
    def needs_one_stream(self) -> bool:
        """Whether this step's work must stay on the compute stream."""
        ...

    def fetch(
        self, layer: int, logical: torch.Tensor, inputs: StepInputs, *, physical: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Make the step's ``physical`` rows of one layer readable; called once a step and layer, behind ``resolve`` and
        in the order in which the layers attend, on the stream that resolved."""
        ...


class BlockTableResolver:
    """Every KV row is on the device: a position's row follows from the block table."""

    def resolve(
        self, logical: torch.Tensor, inputs: StepInputs, *, physical: torch.Tensor, counts: torch.Tensor
    ) -> None:
        logical_to_physical(
            logical,
            inputs.kv_table,
            token_rows=inputs.token_rows[: logical.shape[0]],
            block_size=inputs.block_size,
            out=physical,
            counts=counts,
        )


class SparseMLAIndexGroup:
    """One leader, its followers, and the group's own buffers.

    The buffers are rewritten in every step. Nothing more than the two handoffs is needed for that: the compute stream
    has waited for the conversion before the group's layers attend, and the next step's indexer comes behind them.

    Args:
        layers: the leader first, then its followers.
        streams: of the device.
        side: the stream that resolves; None resolves inline in every step, for a device that has one stream only.
        width: entries of a top-k row.
        decode_rows: rows of the persistent buffers. A step with more rows gets buffers of its own and resolves inline,
            on the compute stream: a prefill hides nothing by a second stream.
    Attributes:
        resolver: may be exchanged between steps, not under a full graph, which holds what it was captured with.
        logical_topk_ready: published by the leader's indexer, awaited by the conversion.
        physical_topk_ready: published by the conversion, awaited by the first layer that attends.
        fetcher: brings rows for each layer; None, unless ``fetch_with`` was called.
        rows_ready: with a fetcher, by layer: published when the layer's rows are there, awaited by its attention. They
            stand in for ``physical_topk_ready``.
    """

    def __init__(
        self,
        layers: Sequence[int],
        *,
        streams: Streams,
        side: Stream | None,
        width: int,
        decode_rows: int,
        resolver: TopKResolver,
    ) -> None:
        self.layers = tuple(layers)
        leader, conversion = self.layers[0], f"conversion for layers {self.layers}"
        self.logical_topk_ready = Handoff(
            streams,
            f"logical_topk_ready of layer {leader}",
            producer=f"indexer of layer {leader}",
            consumers=(conversion,),
        )
        self.physical_topk_ready = Handoff(
            streams,
            f"physical_topk_ready of layer {leader}",
            producer=conversion,
            consumers=(f"attention of layers {self.layers}",),
        )
        self._streams = streams
        self._side = side
        self._width = width
        self.resolver = resolver
        self.fetcher: RowFetcher | None = None
        self.rows_ready: dict[int, Handoff] = {}
        self._decode_buffers = self._buffers(decode_rows)
        self._step = self._first(0)
        self._rows = 0
        self._resolved = False

    def fetch_with(self, fetcher: RowFetcher) -> None:
        """From now on every layer's rows are fetched before it attends; before the first step."""
        self.fetcher = fetcher
        for layer in self.layers:
            self.rows_ready[layer] = Handoff(
                self._streams,
                f"KV rows of layer {layer}",
                producer=f"copies for layer {layer}",
                consumers=(f"attention of layer {layer}",),
            )

    def _buffers(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Not filled: the leader and the resolver write every entry of a step's rows, in every step."""
        shape, device = (rows, self._width), self._streams.backend.device
        return (
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(shape, dtype=torch.int64, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
        )

    def _first(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logical, physical, counts = self._decode_buffers
        return logical[:rows], physical[:rows], counts[:rows]

    @property
    def inline(self) -> bool:
        """Whether this step resolves on the current stream: it has more rows than the persistent buffers, there is
        no side stream, or rows are fetched to places that layers share."""
        if self.fetcher is not None and self.fetcher.needs_one_stream:
            return True
        return self._side is None or self._rows > self._decode_buffers[0].shape[0]

    def begin_step(self, rows: int) -> None:
        """Forget the last step's selection; on the stream that will compute."""
        if rows > self._decode_buffers[0].shape[0]:
            self._step = self._buffers(rows)
        elif rows != self._rows:  # views last as long as the row count: making them would cost each break some 10 us
            self._step = self._first(rows)
        self._rows = rows
        self._resolved = False

    @property
    def logical_topk_indices(self) -> torch.Tensor:
        """[rows, W] int32 for this step's tokens."""
        return self._step[0]

    def set_logical_topk_ready(self) -> None:
        """The leader has issued everything that fills ``logical_topk_indices``, on the current stream."""
        self.logical_topk_ready.publish()

    def convert_logical_to_physical_topk(
        self, inputs: StepInputs, layer: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Physical rows [rows, W] int64 and counts [rows] int32, for use on the current stream.

        The first caller of a step has them resolved; those behind it, on the same stream, find the work done.

        Args:
            layer: that attends; may be left out where nothing is fetched.

        Raises:
            HandoffError: the leader has not published in this step.
        """
        logical, physical, counts = self._step
        if not self._resolved:
            if self._side is None or self.inline:
                self.logical_topk_ready.require_published()
                self.resolver.resolve(logical, inputs, physical=physical, counts=counts)
            else:
                with self._streams.backend.use(self._side):
                    self.logical_topk_ready.wait()
                    self.resolver.resolve(logical, inputs, physical=physical, counts=counts)
                    if self.fetcher is None:
                        self.physical_topk_ready.publish()
                    else:
                        self._fetch_ahead(inputs, logical, physical, counts)
                if self.fetcher is None:
                    self.physical_topk_ready.wait()
            self._resolved = True
        if self.fetcher is not None:
            assert layer is not None, "rows are fetched for a layer"
            if self.inline:
                self.fetcher.fetch(layer, logical, inputs, physical=physical, counts=counts)
            else:
                self.rows_ready[layer].wait()
        return physical, counts

    def _fetch_ahead(
        self, inputs: StepInputs, logical: torch.Tensor, physical: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """The leader's rows first; its followers' while it attends."""
        assert self.fetcher is not None
        for layer, ready in self.rows_ready.items():
            self.fetcher.fetch(layer, logical, inputs, physical=physical, counts=counts)
            ready.publish()


class SparseMLAIndexGroupBuilder:
    """Collects layers in order: an index-producing layer opens a group, the sparse layers behind it share it."""

    def __init__(self) -> None:
        self._groups: list[list[int]] = []

    def register_layer(self, layer: int, *, is_index_producing_layer: bool) -> None:
        """Add a sparse MLA layer."""
        if is_index_producing_layer:
            self._groups.append([layer])
        elif self._groups:
            self._groups[-1].append(layer)
        else:
            raise ConfigError(f"layer {layer} shares a top-k, but no layer before it produces one")

    def build(
        self, *, streams: Streams, width: int, decode_rows: int, resolver: TopKResolver
    ) -> tuple[SparseMLAIndexGroup, ...]:
        """The groups, on one side stream: their conversions follow each other as their leaders do. A CPU, where work
        runs at once, has nothing to hide beside other work and gets none."""
        side = None if streams.backend.device.type == "cpu" else streams.new_stream("index groups")
        return tuple(
            SparseMLAIndexGroup(
                layers, streams=streams, side=side, width=width, decode_rows=decode_rows, resolver=resolver
            )
            for layers in self._groups
        )
