"""The simulated device as a ``StreamBackend``, with tensors: what torch asks of ``device="sim"`` is issued here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sidestream.streams.backend import Event, Graph, Stream
from sidestream.streams.simulated.device import DeviceCore
from sidestream.streams.simulated.dispatch import Dispatcher, row_numbers
from sidestream.streams.simulated.graph import SimEvent
from sidestream.streams.simulated.hazards import Hazard, Touch
from sidestream.streams.simulated.memory import Pool
from sidestream.streams.simulated.schedule import Order, Rows
from sidestream.streams.simulated.site import here
from sidestream.streams.simulated.tensor import HostTensor, SimTensor, activate


class SimulatedBackend:
    """Implements ``StreamBackend``; tensors live on ``torch.device("sim")`` and run in an unfriendly order.

    The last one made is active: factories take its memory, and tensors of an earlier one must not be used any more.

    Args:
        order: when issued work runs.
        seed: of Order.RANDOM.
        starved: the stream that Order.STARVED holds back.
        external_events: None, or why the device shall be one without them.
    """

    name = "the simulated device"

    def __init__(
        self,
        order: Order = Order.RANDOM,
        *,
        seed: int = 0,
        starved: str | None = None,
        external_events: str | None = None,
    ) -> None:
        self.external_events = external_events
        self._core = DeviceCore(order, seed=seed, starved=starved)
        self._dispatch = Dispatcher(self._core)
        activate(self._dispatch, self._dispatch.new)
        self.device = torch.device("sim", 0)

    # StreamBackend

    def new_stream(self, name: str) -> Stream:
        return self._core.make_stream(name).handle

    def current_stream(self) -> Stream:
        return self._core.current.handle

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        with self._core.using(stream.raw):
            yield

    def new_event(self, *, external: bool) -> Event:
        assert not external or self.external_events is None, self.external_events
        return Event(external, SimEvent(external))

    def record(self, event: Event) -> None:
        self._core.record(event.raw)

    def wait(self, event: Event) -> None:
        self._core.wait(event.raw)

    def wait_stream(self, stream: Stream) -> None:
        if stream.raw is self._core.current:
            return
        event = self.new_event(external=False)
        with self.use(stream):
            self.record(event)
        self.wait(event)

    def event_done(self, event: Event) -> bool:
        self._core.refuse_in_capture("query of an event")
        return all(node.done for node in event.raw.nodes or ())

    def synchronize_event(self, event: Event) -> None:
        self._core.host_wait(event.raw.nodes or (), "synchronize on an event")

    def synchronize(self) -> None:
        self._core.host_wait_all("synchronize")

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        assert isinstance(tensor, SimTensor)
        block = tensor.storage_owner.block
        if stream.raw is not block.stream:
            block.borrowed = True

    def host_buffer(self, shape: Sequence[int], *, dtype: torch.dtype) -> torch.Tensor:
        return HostTensor(*self._core.take_host(shape, dtype=dtype))

    def new_pool(self) -> Any:
        return Pool(private=True)

    def begin_capture(self, name: str, pool: Any) -> Graph:
        return Graph(name, self._core.begin_capture(name, pool or self.new_pool()))

    def end_capture(self, graph: Graph) -> None:
        self._core.end_capture(graph.raw)

    def abort_capture(self, graph: Graph) -> None:
        self._core.abort_capture(graph.raw)

    def is_capturing(self) -> bool:
        return self._core.current.recording is not None

    def replay(self, graph: Graph) -> None:
        self._core.replay(graph.raw)

    # What only a simulation can tell

    def hazards(self) -> tuple[Hazard, ...]:
        """Every pair of conflicting places found so far; runs what is still queued."""
        return self._core.hazards()

    def check(self) -> None:
        """Raise ``HazardError`` if there is one."""
        self._core.check()

    def launch(
        self,
        label: str,
        kernel: Callable[..., None],
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        rows: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        """Issue a kernel that torch cannot see into (Triton, numpy) by what it reads and writes.

        Args:
            kernel: called with CPU views of ``reads`` and then of ``writes``.
            rows: (tensor, index) for tensors of both that are touched only at the rows of their first dimension that
                ``index`` lists; the index itself is read.
        """
        index_of = {id(tensor): index for tensor, index in rows}
        views: list[torch.Tensor] = []
        touches: list[Touch] = []
        chosen: dict[int, torch.Tensor] = {}
        for tensor, write in (*((t, False) for t in reads), *((t, True) for t in writes)):
            assert isinstance(tensor, SimTensor), f"{label} takes {tensor.device} memory"
            views.append(tensor.elem)
            index = index_of.get(id(tensor))
            if index is not None:
                assert isinstance(index, SimTensor), f"{label} takes row numbers in {index.device} memory"
                chosen[len(touches)] = index.elem
            place = len(touches) if index is not None else None
            touches += filter(None, [self._dispatch.touch(tensor, write=write, by_rows=place)])
        for _, index in rows:
            touches += filter(None, [self._dispatch.touch(index, write=False)])

        def run(rows: Rows) -> None:
            for place, index in chosen.items():
                rows[place] = row_numbers(index)
            kernel(*views)

        self._core.issue(label, run, tuple(touches))

    def expect_written(self, tensor: torch.Tensor) -> None:
        """Report elements that still hold the poison of fresh memory when the current stream gets here.

        For what must be whole, padded rows included. Element types of one byte cannot be told from poison.
        """
        assert isinstance(tensor, SimTensor)
        assert tensor.dtype.itemsize > 1, f"{tensor.dtype} has no value that only poison has"
        elem, block, site, log = tensor.elem, tensor.storage_owner.block, here(), self._core.log

        def run(rows: Rows) -> None:
            raw = elem.contiguous().view(torch.uint8).reshape(-1, elem.element_size())
            holes = (raw == block.poison).all(dim=1).nonzero().reshape(-1)
            if holes.numel():
                detail = f"{holes.numel()} of {elem.numel()} elements were never written, the first is {int(holes[0])}"
                log.report(Hazard("unwritten memory", block.taken, site, detail))

        touch = self._dispatch.touch(tensor, write=False)
        self._core.issue("check of written memory", run, (touch,) if touch else ())
