"""Handoffs on real CUDA: the founding fault raises, every cell orders, and a wait covers what came before only."""

from __future__ import annotations

import pytest
import torch

from sidestream.errors import HandoffError
from sidestream.streams import Policy, Streams, WaitKind
from sidestream.streams.cuda import CudaBackend
from tests.gpu.streams.machine import SPIN, Machine, N, plain_event, spin

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[Policy.EXTERNAL, Policy.STREAM], ids=lambda p: p.value)
def machine(request: pytest.FixtureRequest) -> Machine:
    return Machine(request.param)


def expected(machine: Machine, kind: WaitKind) -> set[WaitKind]:
    return {kind if machine.policy is Policy.EXTERNAL else WaitKind.WHOLE_STREAM}


def test_the_founding_fault_raises() -> None:
    """Written naively: a plain event recorded in a segment, then awaited in the eager break behind it."""
    machine = Machine()
    x, event = machine.buffer(), plain_event()
    with machine.on_compute():
        with machine.streams.capture("segment 0") as segment:
            x.fill_(1)
            event.record()
        segment.replay()
        assert not torch.cuda.is_current_stream_capturing()
        with machine.on_side():
            for use in (event.wait, event.synchronize, event.query):
                with pytest.raises(RuntimeError, match="invalid argument"):
                    use()
        with pytest.raises(RuntimeError, match="invalid argument"), machine.streams.capture("segment 1"):
            event.wait()
    assert machine.value(x) == 1.0


def test_cuda_itself_lets_a_stale_external_wait_pass() -> None:
    """Why a handoff keeps its own books: an external event that was never recorded counts as reached."""
    machine = Machine()
    x, event = machine.buffer(), machine.backend.new_event(external=True)
    with machine.on_compute():
        with machine.streams.capture("segment 0") as segment:
            x.fill_(1)
            machine.backend.record(event)
        with machine.on_side():
            machine.backend.wait(event)
        assert machine.backend.event_done(event)
        assert machine.value(x) == 0.0
        segment.replay()
    assert machine.value(x) == 1.0


def test_eager_to_eager(machine: Machine) -> None:
    ready, x, y = machine.handoff(), machine.buffer(), machine.buffer()
    with machine.on_compute():
        spin(SPIN)
        x.fill_(3)
        ready.publish()
    with machine.on_side():
        ready.wait()
        y.copy_(x)
    assert machine.value(y) == 3.0
    assert set(ready.waits) == expected(machine, WaitKind.EVENT)


def test_capture_to_the_same_capture(machine: Machine) -> None:
    ready, back = machine.handoff(), machine.handoff("back")
    n, x, y, z = (machine.buffer() for _ in range(4))
    with machine.on_compute(), machine.streams.capture("whole") as graph:
        spin(SPIN)
        x.copy_(n)
        ready.publish()
        with machine.on_side():
            ready.wait()
            spin(SPIN)
            y.copy_(x)
            back.publish()
        back.wait()
        z.copy_(y)
    assert set(ready.waits) == expected(machine, WaitKind.EDGE)
    for step in range(1, 4):
        with machine.on_compute():
            n.fill_(step)
            graph.replay()
        assert machine.value(z) == step
        machine.streams.begin_step()


def test_capture_to_an_eager_break(machine: Machine) -> None:
    ready, back = machine.handoff(), machine.handoff("back")
    n, x, y, z = (machine.buffer() for _ in range(4))

    def eager_break() -> None:
        with machine.on_side():
            ready.wait()
            spin(SPIN)
            y.copy_(x)
            back.publish()
        back.wait()
        z.copy_(y)

    with machine.on_compute():
        n.fill_(1)
        with machine.streams.capture("segment 0") as segment:
            spin(SPIN)
            x.copy_(n)
            ready.publish()
        segment.replay()
        eager_break()
        assert machine.value(z) == 1.0
        for step in range(2, 52):
            machine.streams.begin_step()
            n.fill_(step)
            segment.replay()
            eager_break()
            if step in (2, 51):
                assert machine.value(z) == step
    assert set(ready.waits) == expected(machine, WaitKind.EXTERNAL_EVENT)


def test_capture_to_another_graph(machine: Machine) -> None:
    ready, joined = machine.handoff(), machine.handoff("joined")
    n, x, y = (machine.buffer() for _ in range(3))
    with machine.on_compute():
        with machine.streams.capture("first") as first:
            spin(SPIN)
            x.copy_(n)
            ready.publish()
        first.replay()
    machine.backend.synchronize()
    with machine.on_side(), machine.streams.capture("second") as second:
        ready.wait()
        y.copy_(x)
        joined.publish()
    assert set(ready.waits) == expected(machine, WaitKind.EXTERNAL_NODE)
    for step in range(1, 6):
        machine.streams.begin_step()
        with machine.on_compute():
            n.fill_(step)
            first.replay()
            with machine.on_side():
                second.replay()
            joined.wait()
        assert machine.value(y) == step


def test_eager_to_capture(machine: Machine) -> None:
    ready, x, y = machine.handoff(), machine.buffer(), machine.buffer()
    with machine.on_side():
        x.fill_(1)
        ready.publish()
    with machine.on_compute():
        with machine.streams.capture("reader") as reader:
            ready.wait()
            y.copy_(x)
        reader.replay()
    assert machine.value(y) == 1.0
    assert set(ready.waits) == expected(machine, WaitKind.EXTERNAL_NODE)
    for step in range(2, 6):
        machine.streams.begin_step()
        with machine.on_side():
            spin(SPIN)
            x.fill_(step)
            ready.publish()
        with machine.on_compute():
            reader.replay()
        assert machine.value(y) == step


def test_a_publish_on_a_side_stream_of_a_capture_joins_again() -> None:
    """The external record must not be left behind as unjoined work."""
    machine = Machine(Policy.EXTERNAL)
    ready, back, x, y = machine.handoff(), machine.handoff("back"), machine.buffer(), machine.buffer()
    with machine.on_compute():
        with machine.streams.capture("whole") as graph:
            ready.publish()
            with machine.on_side():
                ready.wait()
                x.fill_(4)
                back.publish()
            back.wait()
        graph.replay()
        with machine.on_side():
            back.wait()
            y.copy_(x)
    assert machine.value(y) == 4.0


@pytest.mark.parametrize("policy", list(Policy))
def test_whether_the_side_stream_goes_ahead_of_the_segments_rest(policy: Policy) -> None:
    machine = Machine(policy)
    ready, x, y, slow = machine.handoff(), machine.buffer(), machine.buffer(), machine.buffer()
    end, converted = machine.backend.new_event(external=False), machine.backend.new_event(external=False)
    with machine.on_compute(), machine.streams.capture("segment 0") as segment:
        x.fill_(2)
        ready.publish()
        spin(20 * SPIN)
        slow.fill_(1)
    for _ in range(3):
        with machine.on_compute():
            segment.replay()
            machine.backend.record(end)
        with machine.on_side():
            ready.wait()
            y.copy_(x)
            machine.backend.record(converted)
        machine.backend.synchronize_event(converted)
        ahead = not machine.backend.event_done(end)
        assert ahead == (policy is Policy.EXTERNAL)
        assert machine.value(y) == 2.0
        machine.streams.begin_step()


def test_a_wait_before_the_replay_is_refused() -> None:
    machine = Machine()
    ready, x = machine.handoff(), machine.buffer()
    with machine.on_compute(), machine.streams.capture("segment 0"):
        x.fill_(1)
        ready.publish()
    with machine.on_side(), pytest.raises(HandoffError, match="not replayed"):
        ready.wait()


def test_the_compute_stream_carries_over_queued_work() -> None:
    backend = CudaBackend()
    weights = torch.zeros(N, device=backend.device)
    backend.synchronize()
    spin(SPIN)
    weights.fill_(5)
    streams = Streams(backend)
    with backend.use(streams.compute):
        y = weights * 2
    backend.synchronize()
    assert y.amin().item() == y.amax().item() == 10.0
