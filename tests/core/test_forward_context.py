"""The ambient state of a step: one at a time, gone with its block, and what it says about graph pieces."""

from __future__ import annotations

import threading

import pytest
import torch

from sidestream.attention.latent import PagedLatentAttention
from sidestream.attention.step_inputs import StepInputsBuilder
from sidestream.core.batch import Chunk
from sidestream.core.cudagraph_mode import CUDAGraphMode
from sidestream.core.eager_break import eager_break_during_capture
from sidestream.core.forward_context import (
    ForwardContext,
    forward_context,
    get_forward_context,
    in_piecewise_cudagraph,
)
from sidestream.graphs.breakable import BreakableCUDAGraphCapture
from sidestream.ops.kv_rows import kv_row_layout
from sidestream.streams import Streams
from sidestream.streams.simulated import SimulatedBackend


def make_context(mode: CUDAGraphMode) -> ForwardContext:
    """Of a prefill of three tokens."""
    builder = StepInputsBuilder(block_size=8, conv_size=0, kpool=1, rollback=0, max_blocks=2)
    chunk = Chunk("request", 0, 3, (1,), 1, is_decode=False, samples=True)
    layout = kv_row_layout("auto", latent_dim=4, rope_dim=0, model_dtype=torch.float32)
    attention = PagedLatentAttention(layout=layout, scale=1.0, groups=())
    inputs = builder.build([chunk], [5, 6, 7])
    return ForwardContext(inputs=inputs, caches=(), attention=attention, index_sink=attention, mode=mode)


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_only_the_piecewise_mode_is_piecewise(mode: CUDAGraphMode) -> None:
    with forward_context(make_context(mode)):
        assert in_piecewise_cudagraph() is (mode is CUDAGraphMode.PIECEWISE)


def test_without_a_context_nothing_is_piecewise() -> None:
    assert in_piecewise_cudagraph() is False
    with forward_context(make_context(CUDAGraphMode.PIECEWISE)):
        pass
    assert in_piecewise_cudagraph() is False


def test_segments_and_breaks_are_piecewise_at_capture_and_at_replay() -> None:
    """In a break the device says that nothing is captured; the context does not ask it."""
    backend = SimulatedBackend()
    streams = Streams(backend)
    x = torch.zeros(4, device=backend.device)
    backend.synchronize()
    seen: list[tuple[str, bool, bool]] = []

    def note(place: str) -> None:
        seen.append((place, in_piecewise_cudagraph(), backend.is_capturing()))

    @eager_break_during_capture
    def double() -> None:
        note("break")
        x.mul_(2)

    with backend.use(streams.compute):
        streams.begin_step()
        capture = BreakableCUDAGraphCapture(streams, "pieces")
        with forward_context(make_context(CUDAGraphMode.PIECEWISE)), capture as pieces:
            note("segment")
            x.add_(1)
            double()
            note("segment")
            x.add_(1)
        assert seen == [("segment", True, True), ("break", True, False), ("segment", True, True)]
        seen.clear()
        streams.begin_step()
        with forward_context(make_context(CUDAGraphMode.PIECEWISE)):
            note("before the first segment")
            pieces.replay()
            note("behind the last segment")
        streams.begin_step()
    assert [(place, piecewise) for place, piecewise, _ in seen] == [
        ("before the first segment", True),
        ("break", True),
        ("behind the last segment", True),
    ]
    backend.synchronize()
    assert x.tolist() == [9.0] * 4  # (0 + 1) * 2 + 1, and once more
    backend.check()


def test_a_full_capture_is_not_piecewise_and_has_no_break() -> None:
    backend = SimulatedBackend()
    streams = Streams(backend)
    x = torch.zeros(4, device=backend.device)
    backend.synchronize()
    seen: list[bool] = []

    @eager_break_during_capture
    def double() -> None:
        seen.append(in_piecewise_cudagraph())
        x.mul_(2)

    with backend.use(streams.compute):
        with forward_context(make_context(CUDAGraphMode.FULL)), streams.capture("whole") as graph:
            x.add_(1)
            double()
        graph.replay()
        graph.replay()
    backend.synchronize()
    assert seen == [False]  # at capture only: no Python runs in a replay
    assert x.tolist() == [6.0] * 4


def test_the_context_is_the_one_of_its_block() -> None:
    context = make_context(CUDAGraphMode.NONE)
    with forward_context(context) as current:
        assert current is context
        assert get_forward_context() is context


def test_outside_a_step_there_is_no_context() -> None:
    with pytest.raises(AssertionError, match="a layer was called outside a step"):
        get_forward_context()


def test_contexts_do_not_nest() -> None:
    outer = make_context(CUDAGraphMode.NONE)
    with forward_context(outer):
        with pytest.raises(AssertionError, match="already open"), forward_context(make_context(CUDAGraphMode.FULL)):
            raise ValueError("the second context was opened")
        assert get_forward_context() is outer


def test_a_failed_step_leaves_no_context() -> None:
    with pytest.raises(ValueError, match="the step failed"), forward_context(make_context(CUDAGraphMode.PIECEWISE)):
        raise ValueError("the step failed")
    assert in_piecewise_cudagraph() is False
    with forward_context(make_context(CUDAGraphMode.NONE)) as context:
        assert get_forward_context() is context


def test_another_thread_does_not_see_the_step() -> None:
    seen: list[bool] = []
    with forward_context(make_context(CUDAGraphMode.PIECEWISE)):
        thread = threading.Thread(target=lambda: seen.append(in_piecewise_cudagraph()))
        thread.start()
        thread.join()
    assert seen == [False]


@pytest.mark.parametrize("field", ["inputs", "caches", "attention", "index_sink", "mode", "boundary"])
def test_a_context_cannot_be_changed(field: str) -> None:
    context = make_context(CUDAGraphMode.NONE)
    with pytest.raises(AttributeError, match="cannot assign to field"):
        setattr(context, field, None)
