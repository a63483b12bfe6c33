"""Index groups at work without a model: leaders that publish chosen positions, layers that only fetch their rows.

A step copies each leader's ``source`` (the test's choice) to ``logical_topk_indices``, publishes, goes on with other
work, and lets every layer of the group take its physical rows into ``taken`` in an eager break, as attention would.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from sidestream.attention.index_group import (
    BlockTableResolver,
    SparseMLAIndexGroupBuilder,
    TopKResolver,
)
from sidestream.attention.step_inputs import StepInputsBuilder
from sidestream.core.batch import Chunk
from sidestream.core.eager_break import eager_break_during_capture
from sidestream.core.step_inputs import StepInputs
from sidestream.graphs.breakable import BreakableCUDAGraphCapture
from sidestream.ops.index_map.reference import logical_to_physical
from sidestream.streams import Capture, Policy, Stream, Streams
from sidestream.streams.simulated import Order, SimulatedBackend
from sidestream.streams.upload import PackedUpload

BLOCK = 8
MAX_BLOCKS = 4
POOL_BLOCKS = 64
WIDTH = 11
DECODE_ROWS = 8
ROWS = 32
"""Of the longest step."""

Taken = list[tuple[torch.Tensor, torch.Tensor]]
"""Of each layer: physical rows [rows, W] int64 and counts [rows] int32."""


class GroupMachine:
    """A simulated device with index groups, settled before the first step.

    Args:
        groups: layer numbers, leaders first.
        resolver: None maps block tables.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]] = ((0,),),
        *,
        order: Order = Order.RANDOM,
        seed: int = 0,
        starved: str | None = None,
        policy: Policy | None = None,
        resolver: TopKResolver | None = None,
    ) -> None:
        self.backend = SimulatedBackend(order, seed=seed, starved=starved)
        self.streams = Streams(self.backend, policy=policy)
        collected = SparseMLAIndexGroupBuilder()
        for layers in groups:
            for layer in layers:
                collected.register_layer(layer, is_index_producing_layer=layer == layers[0])
        self.groups = collected.build(
            streams=self.streams, width=WIDTH, decode_rows=DECODE_ROWS, resolver=resolver or BlockTableResolver()
        )
        plan = StepInputsBuilder(block_size=BLOCK, conv_size=0, kpool=1, rollback=0, max_blocks=MAX_BLOCKS)
        upload = PackedUpload(self.backend, plan.upload_elements(max_seqs=DECODE_ROWS, max_tokens=ROWS))
        self.builder = replace(plan, place=upload.place, capturable=True)
        device = self.backend.device
        self.sources = [torch.full((ROWS, WIDTH), -1, dtype=torch.int32, device=device) for _ in self.groups]
        self.scratch = torch.zeros(16, 16, device=device)
        self.taken = {
            layer: (
                torch.zeros(ROWS, WIDTH, dtype=torch.int64, device=device),
                torch.zeros(ROWS, dtype=torch.int32, device=device),
            )
            for group in self.groups
            for layer in group.layers
        }
        self.inputs: StepInputs | None = None
        self.logical: list[torch.Tensor] = []
        self.backend.synchronize()

    def on_compute(self) -> AbstractContextManager[None]:
        return self.backend.use(self.streams.compute)

    # A step

    def step_inputs(self) -> StepInputs:
        """Of the step that runs."""
        assert self.inputs is not None, "no step has begun"
        return self.inputs

    def begin_decode(self, seed: int, *, rows: int = 4, live: int = 3) -> StepInputs:
        """A uniform step of ``live`` sequences in ``rows`` rows, with pages and selections drawn from ``seed``."""
        rng = np.random.default_rng(seed)
        positions = rng.integers(1, BLOCK * MAX_BLOCKS, live)
        pages = rng.permutation(np.arange(1, POOL_BLOCKS))[: live * MAX_BLOCKS].reshape(live, MAX_BLOCKS)
        chunks = [
            Chunk(f"r{i}", int(positions[i]), 1, tuple(map(int, pages[i])), i + 1, is_decode=True, samples=True)
            for i in range(live)
        ]
        self._begin(self.builder.build_uniform(chunks, [0] * live, rows=rows))
        self._select([int(p) for p in positions] + [-1] * (rows - live), rng)
        return self.step_inputs()

    def begin_prefill(self, seed: int, *, tokens: int) -> StepInputs:
        """A chunk of ``tokens`` tokens of one sequence."""
        rng = np.random.default_rng(seed)
        pages = tuple(map(int, rng.permutation(np.arange(1, POOL_BLOCKS))[:MAX_BLOCKS]))
        chunk = Chunk("prompt", 0, tokens, pages, 1, is_decode=False, samples=True)
        self._begin(self.builder.build([chunk], [0] * tokens, rows=tokens))
        self._select(list(range(tokens)), rng)
        return self.step_inputs()

    def forward(self) -> None:
        """What a model does with its groups."""
        rows = self.step_inputs().mixer_rows
        for number, group in enumerate(self.groups):
            self.lead(number)
            for layer in group.layers:
                self.scratch.matmul(self.scratch)  # the segment goes on behind the publish
                eager_break_during_capture(partial(self.attend, layer), name=f"attention of layer {layer}")()
                self.scratch.add_(self.taken[layer][1][:rows].sum())  # and reads what the break left

    def lead(self, number: int) -> None:
        group = self.groups[number]
        group.logical_topk_indices.copy_(self.sources[number][: self.step_inputs().mixer_rows])
        group.set_logical_topk_ready()

    def attend(self, layer: int) -> None:
        """Take the layer's rows; at a replay those of the step that runs."""
        group = next(group for group in self.groups if layer in group.layers)
        rows = self.step_inputs().mixer_rows
        physical, counts = group.convert_logical_to_physical_topk(self.step_inputs())
        self.taken[layer][0][:rows].copy_(physical)
        self.taken[layer][1][:rows].copy_(counts)

    # Captures

    def capture_pieces(self, *, rows: int = 4) -> BreakableCUDAGraphCapture:
        """PIECEWISE: the capture is a step of its own."""
        inputs = self.begin_decode(1000 + rows, rows=rows, live=min(3, rows))
        name = f"pieces of {rows}"
        with BreakableCUDAGraphCapture(self.streams, name, inputs=inputs.static_tensors()) as pieces:
            self.forward()
        return pieces

    def capture_whole(self, *, rows: int = 4) -> Capture:
        """FULL: what the breaks do becomes part of one graph."""
        self.begin_decode(2000 + rows, rows=rows, live=min(3, rows))
        with self.streams.capture(f"whole of {rows}") as whole:
            self.forward()
        whole.replay()
        return whole

    # Results

    def results(self) -> Taken:
        """Of this step, on the host, layer by layer."""
        self.backend.synchronize()
        rows = self.step_inputs().mixer_rows
        return [(taken[:rows].cpu(), counts[:rows].cpu()) for taken, counts in self.taken.values()]

    def expected(self) -> Taken:
        """The same by the reference, entry by entry."""
        inputs, found = self.step_inputs(), []
        table, token_rows = inputs.block_table.cpu(), inputs.token_rows.cpu()
        for group, logical in zip(self.groups, self.logical, strict=True):
            out = torch.full(logical.shape, -7, dtype=torch.int64)
            counts = torch.full(logical.shape[:1], -7, dtype=torch.int32)
            logical_to_physical(logical, table, token_rows=token_rows, block_size=BLOCK, out=out, counts=counts)
            found += [(out, counts)] * len(group.layers)
        return found

    def _begin(self, inputs: StepInputs) -> None:
        self.streams.begin_step()
        self.inputs = inputs
        for group in self.groups:
            group.begin_step(inputs.mixer_rows)

    def _select(self, positions: Sequence[int], rng: np.random.Generator) -> None:
        """Draw each row's selection: ascending positions that it may see, then -1; a padding row has none."""
        self.logical = []
        for source in self.sources:
            logical = torch.full((len(positions), WIDTH), -1, dtype=torch.int32)
            for row, position in enumerate(positions):
                seen = np.sort(rng.permutation(position + 1)[:WIDTH])
                logical[row, : len(seen)] = torch.from_numpy(seen.astype(np.int32))
            self.logical.append(logical)
            source[: len(positions)].copy_(logical)


class Recorder:
    """A resolver of its own kind: position p of token row t becomes 100 * t + p. Notes rows and stream of each call."""

    def __init__(self) -> None:
        self.machine: GroupMachine | None = None
        self.calls: list[tuple[int, str]] = []
        self.stream: Stream | None = None

    def resolve(
        self, logical: torch.Tensor, inputs: StepInputs, *, physical: torch.Tensor, counts: torch.Tensor
    ) -> None:
        assert self.machine is not None
        self.stream = self.machine.backend.current_stream()
        self.calls.append((logical.shape[0], self.stream.name))
        rows = 100 * inputs.token_rows[: logical.shape[0], None] + logical.long()
        physical.copy_(torch.where(logical >= 0, rows, -1))
        torch.sum(logical >= 0, dim=1, dtype=torch.int32, out=counts)


def check(got: Taken, expected: Taken) -> None:
    """Equal element by element."""
    assert len(got) == len(expected)
    for layer, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b), f"layer number {layer}: {a.tolist()} is not {b.tolist()}"
