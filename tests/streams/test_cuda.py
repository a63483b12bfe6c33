"""What of the CUDA backend can be shown without a GPU: its signature, its refusal, and how old ROCm is named."""

from __future__ import annotations

import inspect

import pytest
import torch

from sidestream.errors import ConfigError
from sidestream.streams import InlineBackend, StreamBackend
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
