"""How fast memory is copied: inside the host, inside the device, and between them through page-locked memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import psutil
import torch

from sidestream.engine.doctor.report import Finding
from sidestream.engine.doctor.target import Target
from sidestream.streams import InlineBackend, StreamBackend, Streams

HOST_BYTES = 256 * 2**20
DEVICE_BYTES = 2**30
COPIES = 4
"""Back to back between two looks at the clock."""
REPEATS = 7


def host_to_device(target: Target) -> Finding:
    return _over_the_bus(target, to_device=True)


def device_to_host(target: Target) -> Finding:
    return _over_the_bus(target, to_device=False)


def device_copy(target: Target) -> Finding:
    """Bytes read and bytes written both count."""
    backend = target.make_backend()
    size = min(DEVICE_BYTES, torch.cuda.mem_get_info()[0] // 8)
    source = torch.ones(size, dtype=torch.uint8, device=backend.device)
    return _rate(backend, torch.empty_like(source), source, moved=2 * size, how="read and write counted")


def host_copy() -> Finding:
    """Bytes read and bytes written both count."""
    size = min(HOST_BYTES, psutil.virtual_memory().available // 8)
    source = torch.ones(size, dtype=torch.uint8)
    how = f"read and write counted, threads of torch: {torch.get_num_threads()}"
    return _rate(InlineBackend(), torch.zeros_like(source), source, moved=2 * size, how=how)


def _over_the_bus(target: Target, *, to_device: bool) -> Finding:
    backend = target.make_backend()
    size = min(HOST_BYTES, psutil.virtual_memory().available // 8)
    host = backend.host_buffer((size,), dtype=torch.uint8)
    host.fill_(1)
    device = torch.ones(size, dtype=torch.uint8, device=backend.device)
    out, source = (device, host) if to_device else (host, device)
    return _rate(backend, out, source, moved=size, how="page-locked host memory")


def _rate(backend: StreamBackend, out: torch.Tensor, source: torch.Tensor, *, moved: int, how: str) -> Finding:
    """``moved`` bytes a copy, in GB/s: the median of several."""
    streams = Streams(backend)

    def copies() -> None:
        with backend.use(streams.compute):
            for _ in range(COPIES):
                out.copy_(source, non_blocking=True)

    seconds = median_seconds(backend, copies)
    rate = COPIES * moved / seconds / 1e9
    return Finding(significant(rate), f"{source.numel() // 2**20} MiB, {how}, median of {REPEATS}", "GB/s")


def median_seconds(backend: StreamBackend, work: Callable[[], None]) -> float:
    """Host clock from an idle device to an idle device; the first round is not counted."""
    rounds = []
    for _ in range(REPEATS + 1):
        backend.synchronize()
        started = time.perf_counter()
        work()
        backend.synchronize()
        rounds.append(time.perf_counter() - started)
    return statistics.median(rounds[1:])


def significant(value: float) -> float:
    """Three significant digits."""
    return float(f"{value:.3g}")
