"""Captures a model's steps shape by shape and replays them; one memory pool, static buffers shared by all shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from sidestream.core.cudagraph_mode import CUDAGraphMode
from sidestream.core.step_inputs import StepInputs
from sidestream.graphs.breakable import BreakableCUDAGraphCapture, check_addresses
from sidestream.graphs.dispatch import StepPlan
from sidestream.graphs.static_buffers import StaticBuffers
from sidestream.streams import Capture, Streams

Results = Mapping[str, torch.Tensor]
"""What a step gives, by name: [Tp, ..] each."""
Forward = Callable[[], Results]
"""Runs the model in the current forward context."""


@dataclass(frozen=True, slots=True)
class _FullGraph:
    capture: Capture
    addresses: dict[str, int]


class GraphRunner:
    """Captured steps of one model.

    Args:
        streams: of the device.
        buffers: static memory for what crosses breaks, and for results.
        debug: at each replay check that no input moved, and poison every static buffer before it, so that whatever a
            replay fails to write is NaN downstream.
    """

    def __init__(self, streams: Streams, buffers: StaticBuffers, *, debug: bool = False) -> None:
        self.buffers = buffers
        self.debug = debug
        self._streams = streams
        self._pool = streams.backend.new_pool()
        self._captured: dict[StepPlan, BreakableCUDAGraphCapture | _FullGraph] = {}
        self._results: dict[StepPlan, Results] = {}
        self._placed: set[str] = set()

    @property
    def captured(self) -> tuple[StepPlan, ...]:
        """Shapes that have a graph, in order of capture."""
        return tuple(self._captured)

    def capture_of(self, plan: StepPlan) -> BreakableCUDAGraphCapture | Capture:
        """The graph, or the segments and breaks, of a shape."""
        captured = self._captured[plan]
        return captured.capture if isinstance(captured, _FullGraph) else captured

    def capture(self, plan: StepPlan, forward: Forward, inputs: StepInputs) -> None:
        """Capture one shape on the current stream; the step before it must have run the same shape without a graph,
        which makes static buffers, compiles kernels and creates constants.

        Args:
            inputs: of a step on scratch memory, at the addresses that all steps of the shape will use.
        """
        assert plan not in self._captured, f"{plan} is captured already"
        name = f"{plan.mode.value} graph of {plan.key.tokens} tokens{', uniform' if plan.key.uniform else ''}"
        static = inputs.static_tensors()
        self.buffers.freeze()
        try:
            if plan.mode is CUDAGraphMode.FULL:
                graph, results = self._capture_full(name, forward)
                addresses = {key: tensor.data_ptr() for key, tensor in static.items()}
                self._captured[plan] = _FullGraph(graph, addresses)
            else:
                with BreakableCUDAGraphCapture(self._streams, name, pool=self._pool, inputs=static) as pieces:
                    results = self._keep(forward())
                self._captured[plan] = pieces
            self._results[plan] = results
        finally:
            self.buffers.thaw()

    def _capture_full(self, name: str, forward: Forward) -> tuple[Capture, Results]:
        try:
            with self._streams.capture(name, pool=self._pool, closed=True) as graph:
                results = self._keep(forward())
            graph.replay()
        except BaseException as error:
            error.add_note(f"in capture {name!r}")
            raise
        return graph, results

    def warm_up(self, forward: Forward) -> Results:
        """Run a step without a graph in the same static buffers."""
        return self._keep(forward())

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the result ``name``, for a step that writes it itself; other results are copied there."""
        self._placed.add(name)
        return self.buffers.take(name, shape, dtype)

    def replay(self, plan: StepPlan, inputs: StepInputs) -> Results:
        """Run the captured step; what it gives is valid until the next step."""
        captured = self._captured[plan]
        if self.debug:
            self.buffers.poison()
        if isinstance(captured, _FullGraph):
            if self.debug:
                check_addresses(captured.capture.name, captured.addresses, inputs.static_tensors())
            captured.capture.replay()
        else:
            captured.replay(inputs.static_tensors() if self.debug else None)
        return self._results[plan]

    def _keep(self, results: Results) -> Results:
        return {
            name: tensor if name in self._placed else self.buffers.hold(name, tensor)
            for name, tensor in results.items()
        }
