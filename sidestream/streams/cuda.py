"""CUDA streams, events and graphs behind the ``StreamBackend`` protocol; as thin as it can be."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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


_THREAD_LOCAL = 1
"""Capture mode of the drivers: other threads (a server's, a loader's) may go on allocating while this one captures."""


def _begin_bare_capture(stream: torch.cuda.Stream) -> bool:
    """Begin a capture that torch does not know of, and say whether the driver agreed. Never run on ROCm yet."""
    if torch.version.hip is None:
        begin = ctypes.CDLL("libcuda.so.1").cuStreamBeginCapture_v2
    else:
        begin = ctypes.CDLL("libamdhip64.so").hipStreamBeginCapture
    return bool(begin(ctypes.c_void_p(stream.cuda_stream), ctypes.c_int(_THREAD_LOCAL)) == 0)


@dataclass(frozen=True, slots=True)
class _Pool:
    """A memory pool, which an empty graph holds open.

    torch closes a pool for good with its last graph, the first one that failed included.
    """

    id: Any
    anchor: torch.cuda.CUDAGraph


@dataclass(frozen=True, slots=True)
class _Recording:
    """A graph with what must live as long: its pool, and its external events, of which its nodes hold bare handles."""

    graph: torch.cuda.CUDAGraph
    pool: _Pool
    events: list[torch.cuda.Event]


def _current_id(device_index: int) -> tuple[int, int, int]:
    """What torch knows the current stream by. ``torch.cuda.current_stream`` would make an object of it, which takes
    four times as long, and an eager break asks some ten times."""
    key: tuple[int, int, int] = torch._C._cuda_getCurrentStream(device_index)
    return key


class _OnStream:
    """``torch.cuda.stream`` for streams of the current device, in a fifth of its time."""

    __slots__ = ("_before", "_raw")

    def __init__(self, raw: torch.cuda.Stream) -> None:
        self._raw = raw

    def __enter__(self) -> None:
        raw = self._raw
        self._before = _current_id(raw.device_index)
        torch._C._cuda_setStream(raw.stream_id, raw.device_index, raw.device_type)

    def __exit__(self, *error: object) -> None:
        torch._C._cuda_setStream(*self._before)


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
        self._index = index  # a device's own attribute is asked for in C, at three times the cost
        self.external_events: str | None = missing_external_events()
        self._known: dict[tuple[int, int, int], Stream] = {}
        self._open: _Recording | None = None
        self._collects = gc.isenabled()

    def new_stream(self, name: str) -> Stream:
        raw = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream = self._known[(raw.stream_id, raw.device_index, raw.device_type)] = Stream(name, raw)
        return stream

    def current_stream(self) -> Stream:
        key = _current_id(self._index)
        known = self._known.get(key)
        if known is None:
            raw = torch.cuda.current_stream(self.device)
            known = self._known[key] = Stream("default" if raw.cuda_stream == 0 else "foreign", raw)
        return known

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        return _OnStream(stream.raw)

    def new_event(self, *, external: bool) -> Event:
        arguments = {"external": True} if external else {}  # a torch without external events knows no such argument
        return Event(external, torch.cuda.Event(**arguments))  # type: ignore[no-untyped-call]

    def record(self, event: Event) -> None:
        event.raw.record(self.current_stream().raw)
        if self._open is not None:
            self._keep(event, self._open)

    def wait(self, event: Event) -> None:
        event.raw.wait(self.current_stream().raw)
        if self._open is not None:
            self._keep(event, self._open)

    def _keep(self, event: Event, recording: _Recording) -> None:
        """For as long as the graph being recorded; an external event that dies earlier takes the process with it."""
        if event.external:
            recording.events.append(event.raw)

    def wait_stream(self, stream: Stream) -> None:
        current = self.current_stream().raw
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
        pool = _Pool(torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph())
        with torch.cuda.stream(torch.cuda.Stream(self.device)):  # type: ignore[no-untyped-call]
            self._begin(pool.anchor, pool)
            with self._closing():
                self._end(pool.anchor)
        return pool

    def begin_capture(self, name: str, pool: Any) -> Graph:
        recording = _Recording(torch.cuda.CUDAGraph(), self.new_pool() if pool is None else pool, [])
        # cuBLAS cannot be started inside a capture, and each thread starts its own.
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
        self._begin(recording.graph, recording.pool)
        self._open = recording
        return Graph(name, recording)

    def end_capture(self, graph: Graph) -> None:
        with self._closing():
            try:
                self._end(graph.raw.graph)
            except RuntimeError:
                self._unwind(graph.raw.graph)
                raise

    def abort_capture(self, graph: Graph) -> None:
        with self._closing():
            try:
                self._end(graph.raw.graph)
            except RuntimeError:  # it is invalid already; the error that made it so is the one to see
                self._unwind(graph.raw.graph)
            else:
                graph.raw.graph.reset()

    def _begin(self, raw: torch.cuda.CUDAGraph, pool: _Pool) -> None:
        # A graph that dies as garbage (the traceback of a failed capture holds one) makes the open capture invalid.
        self._collects = gc.isenabled()
        gc.disable()
        try:
            raw.capture_begin(pool=pool.id, capture_error_mode="thread_local")
        except RuntimeError:
            self._collect_again()
            raise

    @contextmanager
    def _closing(self) -> Iterator[None]:
        self._open = None
        try:
            yield
        finally:
            self._collect_again()

    def _collect_again(self) -> None:
        if self._collects:
            gc.enable()

    def _end(self, raw: torch.cuda.CUDAGraph) -> None:
        with warnings.catch_warnings():
            # Two eager breaks with nothing between them make an empty segment; it replays as nothing.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            raw.capture_end()

    def _unwind(self, raw: torch.cuda.CUDAGraph) -> None:
        """Give back what torch keeps after an end that failed.

        CUDA has ended the capture by then, but torch leaves before its own half: both of its allocators (device and
        page-locked memory) still count the pool as being recorded to, so that no capture can use it again, and
        random numbers cannot be drawn outside of a capture. Ending an empty capture in the failed one's name does
        the whole of that half.
        """
        # A device that is past saving refuses; then the error being handled is still the one to see.
        if _begin_bare_capture(torch.cuda.current_stream(self.device)):
            with contextlib.suppress(RuntimeError):  # torch got through its half and failed to make it launchable
                self._end(raw)
        raw.reset()

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def replay(self, graph: Graph) -> None:
        graph.raw.graph.replay()
