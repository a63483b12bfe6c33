"""Captures, replays and memory of the simulated device behave as CUDA's do."""

from __future__ import annotations

import pytest
import torch

from sidestream.streams.simulated import DeviceError, HazardError, Order, SimulatedBackend
from tests.streams.programs import Machine


def test_capture_records_and_replay_runs_into_the_same_memory() -> None:
    m = Machine()
    n = m.buffer(4)
    with m.on_compute():
        with m.streams.capture("whole") as graph:
            temporary = n + 1
            out = temporary * 2
            del temporary
        assert out.elem.isnan().all()  # type: ignore[attr-defined]
        address = out.data_ptr()
        for step in range(3):
            n.fill_(step)
            graph.replay()
            assert m.read(out) == [2.0 * (step + 1)] * 4
    assert out.data_ptr() == address
    m.backend.check()


def test_memory_released_in_a_capture_is_spoiled_at_replay() -> None:
    """A weak alias of a temporary sees poison, not the value that it happened to hold."""
    m = Machine()
    n = m.buffer(4, value=1)
    with m.on_compute():
        with m.streams.capture("whole") as graph:
            temporary = n + 1
            alias = temporary.elem  # type: ignore[attr-defined]
            out = temporary * 2
            del temporary
        graph.replay()
    assert m.read(out) == [4.0] * 4
    assert alias.isnan().all()


def test_graphs_of_one_pool_share_memory_and_never_show_the_other_ones_values() -> None:
    m = Machine()
    n, pool = m.buffer(4, value=1), m.backend.new_pool()
    with m.on_compute():
        with m.streams.capture("large", pool=pool) as large:
            out = n + 1
        large.replay()
        address = out.data_ptr()
        del out
        with m.streams.capture("small", pool=pool) as small:
            out = n + 1
        assert out.data_ptr() == address
        assert out.elem.isnan().all()  # type: ignore[attr-defined]
        small.replay()
    assert m.read(out) == [2.0] * 4
    m.backend.check()


def test_what_one_segment_leaves_for_the_next_survives_its_capture() -> None:
    """The second segment reads it, drops it and takes its memory again, before either of them is replayed."""
    m = Machine()
    n, pool = m.buffer(4, value=1), m.backend.new_pool()
    with m.on_compute():
        with m.streams.capture("first", pool=pool) as first:
            between = n + 1
        first.replay()
        address = between.data_ptr()
        with m.streams.capture("second", pool=pool) as second:
            kept = between * 3
            del between
            again = n + 4
        assert again.data_ptr() == address
        second.replay()
    assert m.read(kept) == [6.0] * 4
    assert m.read(again) == [5.0] * 4
    m.backend.check()


def test_eager_memory_is_reused_on_its_stream_only() -> None:
    backend = SimulatedBackend(Order.LAZY)
    side = backend.new_stream("side")
    x = torch.ones(4, device="sim")
    address = x.data_ptr()
    del x
    with backend.use(side):
        other = torch.ones(4, device="sim")
    again = torch.ones(4, device="sim")
    assert other.data_ptr() != address
    assert again.data_ptr() == address
    assert again.tolist() == [1.0] * 4
    backend.check()


def test_memory_lent_to_another_stream_is_not_reused() -> None:
    backend = SimulatedBackend(Order.LAZY)
    side = backend.new_stream("side")
    x = torch.ones(4, device="sim")
    address = x.data_ptr()
    backend.record_stream(x, side)
    del x
    assert torch.ones(4, device="sim").data_ptr() != address


def test_a_graph_does_not_run_beside_itself() -> None:
    for seed in range(20):
        m = Machine(Order.RANDOM, seed)
        x = m.buffer(4)
        with m.on_compute():
            with m.streams.capture("whole") as graph:
                x.copy_(x * 2 + 1)
            graph.replay()
        with m.on_side():
            graph.replay()
        assert m.read(x) == [3.0] * 4


def test_a_stream_forks_by_waiting_and_is_released_at_the_end() -> None:
    m = Machine()
    backend, x = m.backend, m.buffer(4)
    fork, join = backend.new_event(external=False), backend.new_event(external=False)
    with m.on_compute(), m.streams.capture("whole"):
        backend.record(fork)
        with m.on_side():
            assert not backend.is_capturing()
            backend.wait(fork)
            assert backend.is_capturing()
            x.fill_(1)
            backend.record(join)
        backend.wait(join)
    with m.on_side():
        assert not backend.is_capturing()
    assert m.read(x) == [0.0] * 4


def test_an_external_wait_before_any_record_passes() -> None:
    """As on CUDA: why a handoff refuses it itself."""
    m = Machine()
    m.backend.wait(m.backend.new_event(external=True))


def test_a_capture_must_end_where_it_began() -> None:
    m = Machine()
    with m.on_compute():
        graph = m.backend.begin_capture("whole", None)
    with m.on_side(), pytest.raises(DeviceError, match="another stream"):
        m.backend.end_capture(graph)
    m.backend.synchronize()


def test_a_device_without_external_events_falls_back() -> None:
    from sidestream.streams import Policy, Streams

    backend = SimulatedBackend(external_events="ROCm 6.4 has no external events (7 has)")
    assert Streams(backend).report.policy is Policy.STREAM
    with pytest.raises(AssertionError, match=r"ROCm 6\.4"):
        backend.new_event(external=True)


def test_check_raises_with_both_places() -> None:
    m = Machine()
    x = m.buffer(4)
    with m.on_compute():
        x.fill_(1)
    with m.on_side():
        x.fill_(2)
    with pytest.raises(HazardError) as raised:
        m.backend.check()
    text = str(raised.value)
    assert "unordered write after write" in text
    assert "aten.fill_.Scalar on side does not wait for aten.fill_.Scalar on compute" in text
    assert text.count("test_device.py:") == 2
    assert "the memory taken at" in text
    assert "programs.py:" in text


def test_rows_of_a_declared_kernel_are_told_apart() -> None:
    m = Machine()
    pool, new = m.buffer(8, 4), m.buffer(1, 4, value=1)
    here, there = (torch.tensor([i], device="sim") for i in (3, 4))
    m.backend.synchronize()

    def store(values: torch.Tensor, target: torch.Tensor) -> None:
        target[3] = values[0]

    with m.on_compute():
        m.backend.launch("store", store, reads=(new,), writes=(pool,), rows=((pool, here),))
    with m.on_side():
        pool.index_select(0, there)
    m.backend.check()
    with m.on_side():
        pool.index_select(0, here)
    assert [hazard.kind for hazard in m.backend.hazards()] == ["unordered read after write"]
    assert m.read(pool)[3] == [1.0] * 4
