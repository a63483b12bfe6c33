"""Steps that benchmarks of streams and graphs measure on a GPU, and how: spinning kernels, captures, clocks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from sidestream.graphs.breakable import BreakableCUDAGraphCapture
from sidestream.streams import Streams

STEPS = 10


def spin(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def cycles_per_us() -> float:
    """Of the clock that ``spin`` counts."""
    spin(1_000_000)
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        spin(20_000_000)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 20.0 / statistics.median(times)


def wall_us(step: Callable[[], None], *, steps: int = STEPS) -> float:
    """Microseconds a step, of steps issued one behind the other."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - started) / steps


def host_us(step: Callable[[], None]) -> float:
    """Microseconds until a step is issued, on an idle device."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    return 1e6 * (time.perf_counter() - started)


def captured(streams: Streams, forward: Callable[[], None], *, full: bool) -> Callable[[], None]:
    """``forward`` as one graph, or in pieces with its breaks between them."""
    if full:
        with streams.capture("step", closed=True) as graph:
            forward()
        return graph.replay
    with BreakableCUDAGraphCapture(streams, "step") as pieces:
        forward()
    return pieces.replay
