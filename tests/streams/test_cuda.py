"""What of the CUDA backend can be shown without a GPU: signature, refusals, and what it does around a capture."""

from __future__ import annotations

import contextlib
import gc
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sidestream.errors import ConfigError
from sidestream.streams import InlineBackend, StreamBackend, cuda
from sidestream.streams.cuda import CudaBackend, missing_external_events
from sidestream.streams.simulated import SimulatedBackend


@pytest.mark.parametrize("backend", [CudaBackend, InlineBackend, SimulatedBackend])
def test_every_backend_has_the_protocols_methods(backend: type) -> None:
    for name, method in inspect.getmembers(StreamBackend, inspect.isfunction):
        if not name.startswith("_"):
            wanted, found = inspect.signature(method), inspect.signature(getattr(backend, name))
            assert wanted.parameters.keys() == found.parameters.keys(), name


def test_no_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"GPU 3 .* sees none"):
        CudaBackend(3)


def test_old_rocm_and_old_torch_have_no_external_events(monkeypatch: pytest.MonkeyPatch) -> None:
    def old_event(**arguments: bool) -> None:
        raise TypeError(f"unexpected arguments {arguments}")

    monkeypatch.setattr(torch.cuda, "Event", old_event)
    assert missing_external_events() == f"torch {torch.__version__} has no external events"
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    assert missing_external_events() == "ROCm 6.4.1 has no external events (7 has)"
    monkeypatch.setattr(torch.version, "hip", "7.0.2")
    monkeypatch.setattr(torch.cuda, "Event", lambda **arguments: object())
    assert missing_external_events() is None


class RecordedGraph:
    """In place of torch's graph: notes each call with whether garbage could be collected during it."""

    log: list[tuple[str, bool]]
    fails: list[str]
    """Messages of the next ends that shall fail; the end of the pool's own graph is not among them."""

    def capture_begin(self, *, pool: tuple[int, int], capture_error_mode: str) -> None:
        assert pool == (0, 7)
        assert capture_error_mode == "thread_local"
        self.log.append(("begin", gc.isenabled()))

    def capture_end(self) -> None:
        self.log.append(("end", gc.isenabled()))
        if len(self.log) > 2 and self.fails:
            raise RuntimeError(self.fails.pop(0))
        warnings.warn("The CUDA Graph is empty. This usually means something.", stacklevel=2)

    def reset(self) -> None:
        self.log.append(("reset", gc.isenabled()))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[RecordedGraph]]:
    """The backend's calls, on a machine that seems to have a GPU; the driver's own capture is one of them."""

    def bare(stream: Any) -> bool:
        RecordedGraph.log.append(("bare", gc.isenabled()))
        return True

    RecordedGraph.log, RecordedGraph.fails = [], []
    for name, value in {
        "is_available": lambda: True,
        "set_device": lambda index: None,
        "Event": lambda **arguments: object(),
        "Stream": lambda device: object(),
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device: object(),
        "graph_pool_handle": lambda: (0, 7),
        "current_blas_handle": lambda: 1,
        "CUDAGraph": RecordedGraph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda, "_begin_bare_capture", bare)
    assert gc.isenabled()
    yield RecordedGraph
    assert gc.isenabled()


def quiet(*names: str) -> list[tuple[str, bool]]:
    """Calls in this order, none of them with the collector on."""
    return [(name, False) for name in names]


def test_nothing_is_collected_inside_a_capture(recorded: type[RecordedGraph]) -> None:
    backend = CudaBackend()
    graph = backend.begin_capture("segment 0", None)
    assert not gc.isenabled()
    backend.end_capture(graph)
    assert recorded.log == quiet("begin", "end", "begin", "end")


def test_a_capture_that_is_given_up_frees_its_graph(recorded: type[RecordedGraph]) -> None:
    backend = CudaBackend()
    backend.abort_capture(backend.begin_capture("segment 0", None))
    assert recorded.log == quiet("begin", "end", "begin", "end", "reset")


@pytest.mark.parametrize("again", [[], ["not launchable"]])
def test_a_failed_end_is_unwound_and_its_error_is_seen(recorded: type[RecordedGraph], again: list[str]) -> None:
    backend = CudaBackend()
    graph = backend.begin_capture("segment 0", None)
    recorded.fails = ["unjoined work", *again]
    with pytest.raises(RuntimeError, match="unjoined work"):
        backend.end_capture(graph)
    assert recorded.log == quiet("begin", "end", "begin", "end", "bare", "end", "reset")


def test_giving_up_an_invalid_capture_raises_nothing(recorded: type[RecordedGraph]) -> None:
    backend = CudaBackend()
    graph = backend.begin_capture("segment 0", None)
    recorded.fails = ["invalid"]
    backend.abort_capture(graph)
    assert recorded.log == quiet("begin", "end", "begin", "end", "bare", "end", "reset")


def test_a_collector_that_was_off_stays_off(recorded: type[RecordedGraph]) -> None:
    backend = CudaBackend()
    gc.disable()
    try:
        backend.end_capture(backend.begin_capture("segment 0", None))
        assert not gc.isenabled()
    finally:
        gc.enable()
