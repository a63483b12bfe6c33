"""What a device named in the settings is: its streams, its memory, its kernels."""

from __future__ import annotations

import psutil
import torch

from sidestream.streams import InlineBackend, StreamBackend


def open_backend(device: str) -> StreamBackend:
    """Streams, events and graphs of a device named in the settings; what a device needs is imported with it."""
    if device == "cpu":
        return InlineBackend()
    if device == "sim":
        from sidestream.streams.simulated import SimulatedBackend

        return SimulatedBackend()
    from sidestream.streams.cuda import CudaBackend

    return CudaBackend()


def memory_size(device: str) -> int:
    """Bytes of a GPU, or of the machine."""
    if device in ("auto", "cuda") and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1])
    return int(psutil.virtual_memory().total)


def kernels_made_ready(device: str) -> tuple[str, ...]:
    """Kernels that Triton made ready since the first engine of this process was begun."""
    if device != "cuda":
        return ()
    from sidestream.engine import compilations

    compilations.watch()
    return compilations.seen()
