"""The simulated device: streams, events, graphs and memory on a CPU, as strict as CUDA and as unfriendly as a seed."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sidestream.streams.backend import Stream
from sidestream.streams.simulated.graph import REUSE, DeviceError, SimEvent, SimGraph, SimStream
from sidestream.streams.simulated.hazards import Hazard, HazardError, HazardLog, Touch
from sidestream.streams.simulated.memory import Allocator, Block, Pool, Storage, whole_of
from sidestream.streams.simulated.schedule import Node, Order, Run, Scheduler
from sidestream.streams.simulated.site import Site, here

_HOST = 0
"""Timeline of the host."""


class DeviceCore:
    """Work, memory and clocks of one simulated device; ``SimulatedBackend`` adds tensors and the protocol of streams.

    Args:
        order, seed, starved: in which order issued work runs; see ``Order``.
    """

    def __init__(self, order: Order, *, seed: int, starved: str | None) -> None:
        self._scheduler = Scheduler(order, seed=seed, starved=starved)
        self.allocator = Allocator()
        self._clock: dict[int, int] = {_HOST: 1}
        self._ticks: Counter[int] = Counter()
        self._timelines = itertools.count(_HOST + 1)
        self._graph: SimGraph | None = None
        self.log = HazardLog(self._clock)
        self.current = self.make_stream("default")

    def make_stream(self, name: str) -> SimStream:
        stream = SimStream(Stream(name), next(self._timelines))
        object.__setattr__(stream.handle, "raw", stream)
        return stream

    # Memory

    def take(self, shape: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype) -> tuple[torch.Tensor, Storage]:
        """Poisoned memory on the current stream, as a CPU view and the storage that keeps it."""
        self.collect()
        graph = self.current.recording
        pool = self.allocator.default if graph is None else graph.pool
        nbytes = _nbytes(shape, stride, dtype)
        storage, reused = self.allocator.take(nbytes, pool=pool, stream=self.current, poison=_poison_of(dtype))
        block = storage.block
        spoiled, block.poison, block.graph = block.poison, _poison_of(dtype), graph
        if reused and graph is not None and not graph.uses(block):
            # Until its first replay a captured output must not look like what another graph left there. What an earlier
            # segment left for this one stays: this one reads it when it is replayed.
            self._scheduler.finish([access.node for access in block.history])
            block.fill_poison()
        if block.poison != spoiled:
            self._spoil(block, block.taken)
        return _view(block, shape, stride, dtype), storage

    def take_host(self, shape: Sequence[int], *, dtype: torch.dtype) -> tuple[torch.Tensor, Storage]:
        """Page-locked host memory, poisoned."""
        stride = torch.empty(tuple(shape), device="meta").stride()
        storage = self.allocator.take_host(_nbytes(shape, stride, dtype), poison=_poison_of(dtype))
        return _view(storage.block, shape, stride, dtype), storage

    def collect(self) -> None:
        """Let released memory go back to its pools."""
        self.allocator.collect(self._spoil)

    def _spoil(self, block: Block, site: Site) -> None:
        """Overwrite released memory in stream order, so that whoever still reads it is seen."""
        stream: Any = block.stream
        graph: SimGraph | None = stream.recording
        if block.graph is not graph or (block.graph is not None and graph is None):
            return  # memory of another graph, or released in a capture: reused by replays only, or later
        whole = (Touch(block, whole_of(block), True, block.tenant),)
        label = REUSE
        poison, data = block.poison, block.data

        def run(rows: object) -> None:
            data.fill_(poison)

        if graph is not None:
            graph.add(stream, label, site, run=run, touches=whole)
        else:
            self._launch_on(stream, label, site, run=run, touches=whole)

    # Work

    def issue(self, label: str, run: Run, touches: tuple[Touch, ...]) -> None:
        """Issue work to the current stream, or record it."""
        self.collect()
        stream, site = self.current, here()
        if stream.recording is not None:
            stream.recording.add(stream, label, site, run=run, touches=touches)
        else:
            self._launch_on(stream, label, site, run=run, touches=touches)

    def host_access(self, label: str, touches: tuple[Touch, ...]) -> None:
        """The host itself touches page-locked memory, now; whatever is issued later follows."""
        node = Node(label, here(), "the host", run=None, deps=(), clock=dict(self._clock), timeline=_HOST)
        node.done = True
        for touch in touches:
            self.log.access(node, touch)

    def host_wait(self, nodes: Iterable[Node], what: str) -> None:
        """Block the host until nodes are done."""
        self.refuse_in_capture(what)
        nodes = tuple(nodes)
        self._scheduler.finish(nodes)
        for node in nodes:
            _join(self._clock, node.clock)

    def host_wait_all(self, what: str) -> None:
        """Block the host until everything is done."""
        self.refuse_in_capture(what)
        self.collect()
        self._scheduler.finish_all()
        _join(self._clock, self._ticks)

    def refuse_in_capture(self, what: str) -> None:
        """Raise what CUDA raises while any stream is captured."""
        if self._graph is not None:
            raise DeviceError(
                f"CUDA error: operation not permitted when stream is capturing: {what} at {here()}, "
                f"inside capture {self._graph.name!r} begun at {self._graph.begun}"
            )

    def _launch_on(
        self, stream: SimStream, label: str, site: Site, *, run: Run | None, touches: tuple[Touch, ...]
    ) -> None:
        name = stream.handle.name
        node = self._launch(label, site, name, run=run, touches=touches, deps=stream.frontier, line=stream.timeline)
        stream.frontier = (node,)

    def _launch(
        self,
        label: str,
        site: Site,
        where: str,
        *,
        run: Run | None,
        touches: tuple[Touch, ...],
        deps: tuple[Node, ...],
        line: int,
    ) -> Node:
        clock = dict(self._clock)
        for dep in deps:
            _join(clock, dep.clock)
        self._ticks[line] += 1
        clock[line] = self._ticks[line]
        node = Node(label, site, where, run=run, deps=deps, clock=clock, timeline=line)
        for touch in touches:
            owner: Any = touch.block.graph
            if owner is not None and not owner.replays and not touch.write:
                detail = f"{label} on {where} reads what capture {owner.name!r} has recorded but no replay has written"
                self.log.report(Hazard("read before replay", touch.block.taken, site, detail))
            self.log.access(node, touch)
        self._scheduler.submit(node)
        return node

    # Events

    def record(self, event: SimEvent) -> None:
        self.collect()  # what was released before the mark is spoiled before it
        stream, graph, site = self.current, self.current.recording, here()
        event.place = site
        if graph is None:
            event.nodes, event.recording = stream.frontier, None
        elif event.external:
            if event.recorded_by is not None and event.recorded_by[0] is not graph:
                first, place = event.recorded_by
                detail = f"captures {first.name!r} and {graph.name!r} both record one external event"
                self.log.report(Hazard("event recorded by two graphs", place, site, detail))
            event.recorded_by = (graph, site)
            graph.add(stream, "record of an external event", site, records=event)
        else:
            event.nodes, event.recording, event.frontier = None, graph, graph.frontiers[stream]

    def wait(self, event: SimEvent) -> None:
        stream, graph = self.current, self.current.recording
        source = event.recording
        if source is not None and not source.open:
            raise DeviceError(
                f"CUDA error: invalid argument: stream {stream.handle.name!r} waits at {here()} on an event that "
                f"capture {source.name!r} recorded at {event.place}; such an event exists inside its capture only"
            )
        if graph is not None and source is graph:
            graph.follow(stream, event.frontier)
        elif source is not None:
            stream.recording = source  # it forks from the capture
            source.timelines[stream] = next(self._timelines)
            source.frontiers[stream] = event.frontier
        elif graph is None:
            stream.frontier = tuple(dict.fromkeys((*stream.frontier, *(event.nodes or ()))))
        elif event.external:
            graph.add(stream, "wait for an external event", here(), awaits=event)
        elif event.nodes is not None:
            raise DeviceError(
                f"CUDA error: dependency created on uncaptured work in another stream: stream "
                f"{stream.handle.name!r} waits at {here()}, inside capture {graph.name!r}, on a plain event that was "
                f"recorded outside of it at {event.place}"
            )

    # Graphs

    def begin_capture(self, name: str, pool: Pool) -> SimGraph:
        self.refuse_in_capture(f"capture {name!r} begins")
        self.collect()
        graph = self._graph = SimGraph(name, pool, self.current, here())
        self.current.recording = graph
        graph.timelines[self.current] = next(self._timelines)
        graph.frontiers[self.current] = ()
        return graph

    def end_capture(self, graph: SimGraph) -> None:
        assert graph is self._graph, f"capture {graph.name!r} is not the open one"
        self.collect()
        loose = graph.unjoined()
        left = self.current is not graph.origin
        self.abort_capture(graph)
        if left:
            raise DeviceError(f"CUDA error: capture {graph.name!r} ends on another stream than it began on")
        if loose:
            places = "; ".join(f"{op.label} on {op.where} at {op.site}" for op in loose)
            raise DeviceError(
                f"CUDA error: capturing stream has unjoined work: capture {graph.name!r} ends at {here()} without "
                f"waiting for {places}"
            )

    def abort_capture(self, graph: SimGraph) -> None:
        graph.close()
        self._graph = None

    def replay(self, graph: SimGraph) -> None:
        self.refuse_in_capture(f"replay of {graph.name!r}")
        self.collect()
        stream = self.current
        base = (*stream.frontier, *graph.last)
        made: list[Node] = []
        graph.replays += 1
        for op in graph.ops:
            for touch in op.touches:
                self._check_alive(graph, op.site, op.label, touch)
            deps = tuple(made[i] for i in op.deps) or base
            if op.awaits is not None:
                deps = (*deps, *(op.awaits.nodes or ()))
            node = self._launch(
                op.label, op.site, op.where, run=op.run, touches=op.touches, deps=deps, line=op.timeline
            )
            made.append(node)
            if op.records is not None:
                op.records.nodes, op.records.recording = (node,), None
        if made:
            graph.last = tuple(made[i] for i in graph.leaves())
            stream.frontier = graph.last

    def _check_alive(self, graph: SimGraph, site: Site, label: str, touch: Touch) -> None:
        block = touch.block
        if block.pool is graph.pool:
            return
        if block.tenant != touch.tenant or block.released is not None:
            place = block.released or block.taken
            detail = f"graph {graph.name!r} holds {label}, whose memory was released and may belong to others"
            self.log.report(Hazard("released memory in a graph", site, place, detail))

    # Results

    def hazards(self) -> tuple[Hazard, ...]:
        """Everything found, after running what was issued."""
        self._scheduler.finish_all()
        return self.log.settle()

    def check(self) -> None:
        """Raise ``HazardError`` if anything was found."""
        found = self.hazards()
        if found:
            raise HazardError("\n".join(map(str, found)))

    @contextmanager
    def using(self, stream: SimStream) -> Iterator[None]:
        previous, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = previous


def _join(clock: dict[int, int], other: dict[int, int]) -> None:
    for line, tick in other.items():
        if clock.get(line, 0) < tick:
            clock[line] = tick


def _nbytes(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    if math.prod(shape) == 0:
        return 0
    return (sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1) * dtype.itemsize


def _poison_of(dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return 1
    return 0xFF if dtype.is_floating_point or dtype.is_complex else 0x7F


def _view(block: Block, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):
        usable = block.data.numel() // dtype.itemsize * dtype.itemsize
        return block.data[:usable].view(dtype).as_strided(tuple(shape), tuple(stride))
