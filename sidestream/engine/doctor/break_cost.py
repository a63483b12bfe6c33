"""Cost of an eager break: graph segments with an eager kernel between them, against one graph of the same kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sidestream.engine.doctor.bandwidth import significant
from sidestream.engine.doctor.report import Finding
from sidestream.engine.doctor.target import Target
from sidestream.streams import Capture, Handoff, Stream, StreamBackend, Streams

SEGMENTS = 45
BREAKS = SEGMENTS - 1
BUSY = 150_000
"""Clock cycles that each segment keeps the GPU busy, about 80 us, so that the host is always ahead."""
ROUNDS = 30


class Crossing(NamedTuple):
    """The handoffs of one break: to the side stream, and back."""

    ready: Handoff
    back: Handoff


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """The kernels of one step. ``x``, ``y``: [4096] float32; each segment adds 1 to ``x``, each break copies it.

    Args:
        busy: called in each segment.
    """

    streams: Streams
    side: Stream
    busy: Callable[[], None]
    x: torch.Tensor
    y: torch.Tensor

    @classmethod
    def on(cls, backend: StreamBackend, busy: Callable[[], None]) -> Kernels:
        streams = Streams(backend)
        x, y = (torch.zeros(4096, device=backend.device) for _ in range(2))
        backend.synchronize()
        made = cls(streams, streams.new_stream("side"), busy, x, y)
        with backend.use(streams.compute):  # loads the kernels, which a capture does not allow
            made.segment(None)
            made.between(None)
            x.zero_()
            y.zero_()
        backend.synchronize()
        return made

    def crossings(self, name: str, *, handoff: bool) -> list[Crossing | None]:
        """One for each break, or as many None."""
        return [self._crossing(f"{name} {i}") if handoff else None for i in range(BREAKS)]

    def _crossing(self, name: str) -> Crossing:
        ready = Handoff(self.streams, f"ready, {name}", producer="segment", consumers=("side stream",))
        back = Handoff(self.streams, f"back, {name}", producer="side stream", consumers=("compute stream",))
        return Crossing(ready, back)

    def segment(self, crossing: Crossing | None) -> None:
        """``crossing``: of the break behind it."""
        self.busy()
        self.x.add_(1)
        if crossing is not None:
            crossing.ready.publish()

    def between(self, crossing: Crossing | None) -> None:
        if crossing is None:
            self.y.copy_(self.x)
            return
        with self.streams.backend.use(self.side):
            crossing.ready.wait()
            self.y.copy_(self.x)
            crossing.back.publish()
        crossing.back.wait()


def capture_pieces(kernels: Kernels, *, handoff: bool) -> Callable[[], None]:
    """One step as segments with eager breaks; call what is returned on the compute stream, once a step."""
    streams = kernels.streams
    crossings = [*kernels.crossings("pieces", handoff=handoff), None]
    pool, segments = streams.backend.new_pool(), list[Capture]()
    streams.begin_step()
    for i, crossing in enumerate(crossings):
        with streams.capture(f"segment {i}", pool=pool) as segment:
            kernels.segment(crossing)
        segment.replay()
        if i < BREAKS:
            kernels.between(crossing)
        segments.append(segment)

    def step() -> None:
        streams.begin_step()
        for i, segment in enumerate(segments):
            segment.replay()
            if i < BREAKS:
                kernels.between(crossings[i])

    return step


def capture_whole(kernels: Kernels, *, handoff: bool) -> Callable[[], None]:
    """The same step as one graph."""
    streams = kernels.streams
    crossings = [*kernels.crossings("whole", handoff=handoff), None]
    streams.begin_step()
    with streams.capture("whole", closed=True) as graph:
        for i, crossing in enumerate(crossings):
            kernels.segment(crossing)
            if i < BREAKS:
                kernels.between(crossing)

    def step() -> None:
        streams.begin_step()
        graph.replay()

    return step


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Microseconds a step: ``host`` until all is issued, ``wall`` until all is done. Medians."""

    host: float
    wall: float


def measure(target: Target, *, busy: bool, handoff: bool) -> tuple[StepTimes, StepTimes]:
    """Times of a step in pieces and of the whole graph, taken in turn so that both see the same clocks."""
    backend = target.make_backend()
    kernels = Kernels.on(backend, (lambda: target.spin(BUSY)) if busy else (lambda: None))
    with backend.use(kernels.streams.compute):
        steps = [capture_pieces(kernels, handoff=handoff), capture_whole(kernels, handoff=handoff)]
        rounds: list[list[tuple[float, float]]] = [[_time(backend, step) for step in steps] for _ in range(ROUNDS)]
    backend.synchronize()
    pieces, whole = (
        StepTimes(*(1e6 * statistics.median(times) for times in zip(*one, strict=True)))
        for one in zip(*rounds[3:], strict=True)  # the first rounds find caches cold
    )
    return pieces, whole


def _time(backend: StreamBackend, step: Callable[[], None]) -> tuple[float, float]:
    backend.synchronize()
    started = time.perf_counter()
    step()
    issued = time.perf_counter()
    backend.synchronize()
    return issued - started, time.perf_counter() - started


def gpu_bound(target: Target, *, handoff: bool) -> Finding:
    """Time that a break adds to a step whose kernels keep the GPU busy."""
    pieces, whole = measure(target, busy=True, handoff=handoff)
    a_break = (pieces.wall - whole.wall) / BREAKS
    reason = "added to a step by a break while the host is ahead"
    if pieces.host > 0.9 * pieces.wall:
        reason = "not GPU-bound: the host took as long as the step"
    return Finding(significant(a_break), reason, "us", detail=_detail(pieces, whole))


def host_bound(target: Target, *, handoff: bool) -> Finding:
    """Host time that a break adds to a step whose kernels are too small to matter."""
    pieces, whole = measure(target, busy=False, handoff=handoff)
    a_break = (pieces.host - whole.host) / BREAKS
    return Finding(significant(a_break), "host time added by a break", "us", detail=_detail(pieces, whole))


def _detail(pieces: StepTimes, whole: StepTimes) -> dict[str, float]:
    return {
        "segments": SEGMENTS,
        "pieces_wall_us": significant(pieces.wall),
        "pieces_host_us": significant(pieces.host),
        "one_graph_wall_us": significant(whole.wall),
        "one_graph_host_us": significant(whole.host),
    }
