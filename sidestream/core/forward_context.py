"""Ambient state of one step: set by a ``with`` block around the model's forward, read by layers and attention only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from sidestream.core.cudagraph_mode import CUDAGraphMode
from sidestream.core.layer_cache import LayerCache
from sidestream.core.protocols import Boundary, IndexSink, LayerObserver, MLAttention
from sidestream.core.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Immutable while the step runs.

    Attributes:
        mode: how this step runs.
        boundary: where tensors that cross an eager break live; None where no break is recorded (modes NONE and FULL,
            and the replay of a capture, whose breaks hold their buffers already).
        observer: sees what each decoder layer puts out; None in a normal run.
        asked: [N] int64 rows of the step whose hidden states somebody reads, the only ones that the last layer has
            behind its mixer; None: all.
    """

    inputs: StepInputs
    caches: tuple[LayerCache, ...]
    attention: MLAttention
    index_sink: IndexSink
    mode: CUDAGraphMode = CUDAGraphMode.NONE
    boundary: Boundary | None = None
    observer: LayerObserver | None = None
    asked: torch.Tensor | None = None


_CURRENT: ContextVar[ForwardContext | None] = ContextVar("sidestream_forward_context", default=None)


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make ``context`` the current one for the block; contexts do not nest."""
    assert _CURRENT.get() is None, "a forward context is already open"
    token = _CURRENT.set(context)
    try:
        yield context
    finally:
        _CURRENT.reset(token)


def get_forward_context() -> ForwardContext:
    """The context of the step that is running."""
    context = _CURRENT.get()
    assert context is not None, "no forward context: a layer was called outside a step"
    return context


def in_piecewise_cudagraph() -> bool:
    """Whether the running step is made of graph pieces: true in segments and in breaks, at capture and at replay.

    What the device says about capturing is no substitute: inside a break it says no.
    """
    context = _CURRENT.get()
    return context is not None and context.mode is CUDAGraphMode.PIECEWISE
