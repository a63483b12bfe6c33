"""CUDA streams, events and graphs behind the ``StreamBackend`` protocol; as thin as it can be."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from sidestream.errors import ConfigError
from sidestream.streams.backend import Event, Graph, Stream


def missing_external_events() -> str | None:
    """Why external events do not work with this torch, or None if they do. Needs a GPU."""
    hip = torch.version.hip
    if hip is not None and int(hip.split(".")[0]) < 7:
        return f"ROCm {hip} has no external events (7 has)"
    try:
        torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
    except TypeError:
        return f"torch {torch.__version__} has no external events"
    return None


@dataclass(frozen=True, slots=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    pool: Any


class CudaBackend:
    """Implements ``StreamBackend`` for one GPU, which must stay the current device.

    Raises:
        ConfigError: no usable GPU.
    """

    name = "CUDA"

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"GPU {index} was asked for, but torch {torch.__version__} sees none; use the CPU backend instead"
            )
        torch.cuda.set_device(index)
        self.device = torch.device("cuda", index)
        self.external_events: str | None = missing_external_events()
        self._known: dict[int, Stream] = {}

    def new_stream(self, name: str) -> Stream:
        raw = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream = self._known[raw.cuda_stream] = Stream(name, raw)
        return stream

    def current_stream(self) -> Stream:
        raw = torch.cuda.current_stream(self.device)
        known = self._known.get(raw.cuda_stream)
        if known is None:
            known = self._known[raw.cuda_stream] = Stream("default" if raw.cuda_stream == 0 else "foreign", raw)
        return known

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        entered: AbstractContextManager[None] = torch.cuda.stream(stream.raw)
        return entered

    def new_event(self, *, external: bool) -> Event:
        arguments = {"external": True} if external else {}  # a torch without external events knows no such argument
        return Event(external, torch.cuda.Event(**arguments))  # type: ignore[no-untyped-call]

    def record(self, event: Event) -> None:
        event.raw.record()

    def wait(self, event: Event) -> None:
        event.raw.wait()

    def wait_stream(self, stream: Stream) -> None:
        current = torch.cuda.current_stream(self.device)
        if current != stream.raw:
            current.wait_stream(stream.raw)

    def event_done(self, event: Event) -> bool:
        return bool(event.raw.query())

    def synchronize_event(self, event: Event) -> None:
        event.raw.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(stream.raw)

    def host_buffer(self, shape: Sequence[int], *, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def begin_capture(self, name: str, pool: Any) -> Graph:
        raw, pool = torch.cuda.CUDAGraph(), self.new_pool() if pool is None else pool
        # Other threads (a server's, a loader's) may go on allocating while this one captures.
        raw.capture_begin(pool=pool, capture_error_mode="thread_local")
        return Graph(name, _Recording(raw, pool))

    def end_capture(self, graph: Graph) -> None:
        try:
            graph.raw.graph.capture_end()
        except RuntimeError:
            self._release_allocator(graph.raw)
            raise

    def abort_capture(self, graph: Graph) -> None:
        try:
            with warnings.catch_warnings(action="ignore"):  # an empty graph is warned about; this one is dropped
                graph.raw.graph.capture_end()
        except RuntimeError:  # it is invalid already; the error that made it so is the one to see
            self._release_allocator(graph.raw)

    def _release_allocator(self, recording: _Recording) -> None:
        """After a failed end, torch leaves its allocator asking the dropped graph where memory shall come from."""
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device.index, recording.pool)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def replay(self, graph: Graph) -> None:
        graph.raw.graph.replay()
