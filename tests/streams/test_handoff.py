"""Every cell of the handoff's table on the simulated device: what it becomes, that it orders, that misuse is named."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest

from sidestream.errors import ConfigError, GraphError, HandoffError
from sidestream.streams import Handoff, Policy, Streams, WaitKind
from sidestream.streams.simulated import DeviceError, Order, SimulatedBackend
from tests.streams.programs import ORDERS, Machine


@pytest.fixture(params=ORDERS, ids=lambda p: f"{p[0].value}-{p[1]}-{p[2]}")
def order(request: pytest.FixtureRequest) -> tuple[Order, int, str | None]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=[Policy.EXTERNAL, Policy.STREAM], ids=lambda p: p.value)
def machine(request: pytest.FixtureRequest, order: tuple[Order, int, str | None]) -> Machine:
    return Machine(*order, policy=request.param)


@contextlib.contextmanager
def side_of(machine: Machine, handoff: Handoff) -> Iterator[None]:
    with machine.on_side():
        handoff.wait()
        yield


def kind(machine: Machine, external: WaitKind) -> dict[WaitKind, int]:
    return {external if machine.policy is Policy.EXTERNAL else WaitKind.WHOLE_STREAM: 1}


def test_eager_to_eager(machine: Machine) -> None:
    ready, x, y = machine.handoff(), machine.buffer(8), machine.buffer(8)
    with machine.on_compute():
        x.fill_(3)
        ready.publish()
    with side_of(machine, ready):
        y.copy_(x)
    assert machine.read(y) == [3.0] * 8
    assert ready.waits == kind(machine, WaitKind.EVENT)
    machine.backend.check()


def test_capture_to_the_same_capture(machine: Machine) -> None:
    ready, back = machine.handoff(), machine.handoff("converted", ("attention",))
    x, y, z, n = (machine.buffer(8) for _ in range(4))
    with machine.on_compute(), machine.streams.capture("whole", pool=machine.backend.new_pool()) as graph:
        x.copy_(n)
        ready.publish()
        with side_of(machine, ready):
            y.copy_(x)
            back.publish()
        x_seen = x * 10
        back.wait()
        z.copy_(y + x_seen)
    assert ready.waits == back.waits == kind(machine, WaitKind.EDGE)
    assert graph.published == ("topk_ready", "converted")
    assert graph.awaited == ()
    for step in range(3):
        with machine.on_compute():
            n.fill_(step)
            graph.replay()
        assert machine.read(z) == [11.0 * step] * 8
        machine.streams.begin_step()
    machine.backend.check()


def test_capture_to_an_eager_break(machine: Machine) -> None:
    ready, back = machine.handoff(), machine.handoff("converted", ("attention",))
    x, y, z, n = (machine.buffer(8) for _ in range(4))

    def eager_break() -> None:
        with side_of(machine, ready):
            y.copy_(x)
            back.publish()
        back.wait()
        z.copy_(y)

    with machine.on_compute():
        n.fill_(7)
        with machine.streams.capture("segment 0") as segment:
            x.copy_(n)
            ready.publish()
            n.mul_(1)
        segment.replay()
        eager_break()
        assert machine.read(z) == [7.0] * 8
        for step in range(2, 5):
            machine.streams.begin_step()
            n.fill_(step)
            segment.replay()
            eager_break()
            assert machine.read(z) == [float(step)] * 8
    if machine.policy is Policy.EXTERNAL:
        assert ready.waits == {WaitKind.EXTERNAL_EVENT: 4}
    else:
        assert ready.waits == {WaitKind.WHOLE_STREAM: 4}
    machine.backend.check()


def test_capture_to_another_graph(machine: Machine) -> None:
    ready, joined = machine.handoff(), machine.handoff("joined", ("next step",))
    x, y, n = (machine.buffer(8) for _ in range(3))
    pool = machine.backend.new_pool()
    with machine.on_compute():
        with machine.streams.capture("first", pool=pool) as first:
            x.copy_(n)
            ready.publish()
        first.replay()
        with machine.on_side(), machine.streams.capture("second", pool=pool) as second:
            ready.wait()
            y.copy_(x)
            joined.publish()
    assert second.awaited == ("topk_ready",)
    assert ready.waits == kind(machine, WaitKind.EXTERNAL_NODE)
    for step in range(1, 4):
        machine.streams.begin_step()
        with machine.on_compute():
            n.fill_(step)
            first.replay()
            with machine.on_side():
                second.replay()
            joined.wait()
        assert machine.read(y) == [float(step)] * 8
    machine.backend.check()


def test_eager_to_capture(machine: Machine) -> None:
    ready, x, y = machine.handoff(), machine.buffer(8), machine.buffer(8)
    done = machine.handoff("done", ("next step",))
    with machine.on_side():
        x.fill_(1)
        ready.publish()
    with machine.on_compute(), machine.streams.capture("reader") as reader:
        ready.wait()
        y.copy_(x)
        done.publish()
    assert ready.waits == kind(machine, WaitKind.EXTERNAL_NODE)
    with machine.on_compute():
        reader.replay()
    for step in range(2, 5):
        with machine.on_side():
            done.wait()
            machine.streams.begin_step()
            x.fill_(step)
            ready.publish()
        with machine.on_compute():
            reader.replay()
        assert machine.read(y) == [float(step)] * 8
    machine.backend.check()


def test_an_external_wait_covers_only_what_came_before() -> None:
    machine = Machine(Order.LAZY)
    ready, x, y, slow = machine.handoff(), machine.buffer(8), machine.buffer(8), machine.buffer(8)
    with machine.on_compute():
        with machine.streams.capture("segment 0") as segment:
            x.fill_(2)
            ready.publish()
            slow.fill_(1)
        segment.replay()
    after = machine.backend.new_event(external=False)
    with side_of(machine, ready):
        y.copy_(x)
        machine.backend.record(after)
    machine.backend.synchronize_event(after)  # lazily: exactly what it needs has run
    assert y.elem.tolist() == [2.0] * 8  # type: ignore[attr-defined]
    assert slow.elem.tolist() == [0.0] * 8  # type: ignore[attr-defined]


def test_the_stream_policy_waits_for_the_rest_too() -> None:
    machine = Machine(Order.LAZY, policy=Policy.STREAM)
    ready, x, slow = machine.handoff(), machine.buffer(8), machine.buffer(8)
    with machine.on_compute():
        with machine.streams.capture("segment 0") as segment:
            x.fill_(2)
            ready.publish()
            slow.fill_(1)
        segment.replay()
    after = machine.backend.new_event(external=False)
    with side_of(machine, ready):
        machine.backend.record(after)
    machine.backend.synchronize_event(after)
    assert slow.elem.tolist() == [1.0] * 8  # type: ignore[attr-defined]


def test_the_founding_fault_raises() -> None:
    """As written before handoffs: a plain event recorded in a segment, awaited in the break behind it."""
    machine = Machine()
    backend, x = machine.backend, machine.buffer(4)
    event = backend.new_event(external=False)
    with machine.on_compute():
        with machine.streams.capture("segment 0"):
            x.fill_(1)
            backend.record(event)
        assert not backend.is_capturing()  # so this could not have been the guard
        with machine.on_side(), pytest.raises(DeviceError, match=r"invalid argument.*'side'.*'segment 0'"):
            backend.wait(event)


def test_a_plain_eager_event_in_a_capture_raises() -> None:
    machine = Machine()
    backend, x = machine.backend, machine.buffer(4)
    event = backend.new_event(external=False)
    with machine.on_side():
        x.fill_(1)
        backend.record(event)
    with (
        machine.on_compute(),
        pytest.raises(DeviceError, match=r"uncaptured work in another stream.*'compute'.*'segment 0'"),
        machine.streams.capture("segment 0"),
    ):
        backend.wait(event)
    assert machine.streams.open_capture is None
    assert not backend.is_capturing()


def test_a_wait_before_the_replay_is_refused() -> None:
    machine = Machine()
    ready, x = machine.handoff(), machine.buffer(4)
    with machine.on_compute(), machine.streams.capture("segment 0") as segment:
        x.fill_(1)
        ready.publish()
    with machine.on_side(), pytest.raises(HandoffError, match=r"'indexer' to 'conversion'.*'segment 0'.*not replayed"):
        ready.wait()
    with machine.on_compute():
        segment.replay()
    with machine.on_side():
        ready.wait()


def test_a_publish_of_an_earlier_replay_is_stale() -> None:
    machine = Machine()
    ready, x = machine.handoff(), machine.buffer(4)
    with machine.on_compute():
        with machine.streams.capture("segment 0") as segment:
            x.fill_(1)
            ready.publish()
        segment.replay()
    machine.streams.begin_step()
    with machine.on_side(), pytest.raises(HandoffError, match=r"'indexer' to 'conversion'.*not published in step 2"):
        ready.wait()


@pytest.mark.parametrize("policy", list(Policy))
def test_a_graph_that_waits_is_replayed_only_where_its_source_published(policy: Policy) -> None:
    machine = Machine(policy=policy)
    ready, x, y = machine.handoff(), machine.buffer(4), machine.buffer(4)
    with machine.on_compute():
        with machine.streams.capture("small") as small:
            x.fill_(1)
            ready.publish()
        small.replay()
        with machine.streams.capture("reader") as reader:
            ready.wait()
            y.copy_(x)
        reader.replay()
        machine.streams.begin_step()
        with machine.streams.capture("large") as large:
            x.fill_(2)
            ready.publish()
        large.replay()
        with pytest.raises(
            HandoffError, match=r"'indexer' to 'conversion': Capture\('reader'\).*'small'.*published by Capture\('large"
        ):
            reader.replay()
        machine.streams.begin_step()
        with pytest.raises(HandoffError, match=r"'indexer' to 'conversion'.*not published in step 3"):
            reader.replay()
        x.fill_(9)
        ready.publish()
        with pytest.raises(HandoffError, match="published eagerly"):
            reader.replay()
        machine.streams.begin_step()
        small.replay()
        reader.replay()
    assert machine.read(y) == [1.0] * 4


def test_two_publishes_in_a_step_are_refused_also_by_a_replay() -> None:
    machine = Machine()
    ready, x = machine.handoff(), machine.buffer(4)
    with machine.on_compute():
        with machine.streams.capture("segment 0") as segment:
            x.fill_(1)
            ready.publish()
        segment.replay()
        with pytest.raises(HandoffError, match=r"published twice in step 1, the first time in Capture\('segment 0'\)"):
            segment.replay()
        machine.streams.begin_step()
        ready.publish()
        with pytest.raises(HandoffError, match="published twice in step 2, the first time eagerly"):
            segment.replay()


def test_each_capture_that_publishes_has_an_event_of_its_own() -> None:
    machine = Machine()
    ready, x, y = machine.handoff(), machine.buffer(4), machine.buffer(4)
    graphs = []
    with machine.on_compute():
        for size in (4, 2, 1):
            with machine.streams.capture(f"size {size}") as graph:
                x[:size].fill_(size)
                ready.publish()
            graphs.append(graph)
            machine.streams.begin_step()
        for graph, value in zip(graphs, (4.0, 2.0, 1.0), strict=True):
            graph.replay()
            with machine.on_side():
                ready.wait()
                y.copy_(x)
            machine.backend.synchronize()
            assert y.tolist()[0] == value
            machine.streams.begin_step()
    machine.backend.check()


def test_a_handoff_keeps_no_capture_alive() -> None:
    machine = Machine()
    ready, x = machine.handoff(), machine.buffer(4)
    with machine.on_compute():
        with machine.streams.capture("segment 0") as segment:
            x.fill_(1)
            ready.publish()
        segment.replay()
    machine.streams.begin_step()
    ready.publish()
    dropped = weakref.ref(segment)
    del segment
    gc.collect()
    assert dropped() is None


def test_a_publish_on_a_stream_outside_the_capture_is_a_bug() -> None:
    machine = Machine()
    ready = machine.handoff()
    with (
        machine.on_compute(),
        machine.streams.capture("segment 0"),
        machine.on_side(),
        pytest.raises(HandoffError, match="'side', which Capture"),
    ):
        ready.publish()


def test_an_error_inside_a_capture_leaves_none_open() -> None:
    machine = Machine()
    ready, x = machine.handoff(), machine.buffer(4)
    with machine.on_compute():
        with contextlib.suppress(KeyError), machine.streams.capture("segment 0") as broken:
            x.fill_(1)
            ready.publish()
            raise KeyError
        assert machine.streams.open_capture is None
        with pytest.raises(GraphError, match="dropped"):
            broken.replay()
        with machine.on_side(), pytest.raises(HandoffError, match="not replayed"):
            ready.wait()
        with machine.streams.capture("segment 0 again") as graph:
            x.fill_(2)
            ready.publish()
        graph.replay()
    assert machine.read(x) == [2.0] * 4


def test_the_compute_stream_carries_over_queued_work() -> None:
    import torch

    backend = SimulatedBackend(Order.STARVED, starved="default")
    weights = torch.zeros(4, device="sim")
    weights.fill_(5)
    streams = Streams(backend)
    with backend.use(streams.compute):
        y = weights * 2
    backend.check()
    assert y.tolist() == [10.0] * 4


def test_a_closed_capture_orders_inside_and_holds_no_event_node(machine: Machine) -> None:
    ready, back = machine.handoff(), machine.handoff("converted", ("attention",))
    x, y, n = (machine.buffer(8) for _ in range(3))
    with machine.on_compute(), machine.streams.capture("whole", closed=True) as graph:
        x.copy_(n)
        ready.publish()
        with side_of(machine, ready):
            y.copy_(x)
            back.publish()
        back.wait()
        y.add_(1)
    assert ready.waits == back.waits == kind(machine, WaitKind.EDGE)
    assert not [op for op in graph._graph.raw.ops if op.records is not None]
    for step in range(3):
        with machine.on_compute():
            n.fill_(step)
            graph.replay()
        assert machine.read(y) == [step + 1.0] * 8
        machine.streams.begin_step()
    machine.backend.check()


@pytest.mark.parametrize("where", ["eager", "another graph"])
def test_nothing_outside_waits_for_what_a_closed_capture_publishes(machine: Machine, where: str) -> None:
    ready, x = machine.handoff(), machine.buffer(8)
    with machine.on_compute():
        with machine.streams.capture("whole", closed=True) as graph:
            x.fill_(1)
            ready.publish()
        graph.replay()
    outside = contextlib.nullcontext() if where == "eager" else machine.streams.capture("other")
    with (
        machine.on_compute(),
        pytest.raises(HandoffError, match=r"'topk_ready' from 'indexer' to 'conversion'.*Capture\('whole'\).*closed"),
        outside,
    ):
        ready.wait()
    assert not ready.waits


def test_a_consumer_on_the_producers_own_stream_checks_without_waiting() -> None:
    machine = Machine()
    ready, x = machine.handoff(), machine.buffer(8)
    with pytest.raises(HandoffError, match="never published"):
        ready.require_published()
    with machine.on_compute():
        with machine.streams.capture("segment") as segment:
            x.fill_(1)
            ready.publish()
        with pytest.raises(HandoffError, match="not replayed since"):
            ready.require_published()
        segment.replay()
        ready.require_published()
    assert not ready.waits
    machine.streams.begin_step()
    with pytest.raises(HandoffError, match="was not published in step"):
        ready.require_published()


def test_a_policy_may_be_named() -> None:
    assert Streams(SimulatedBackend(), policy="stream").report.policy is Policy.STREAM
    with pytest.raises(ConfigError, match="stream policy is 'fast', allowed are 'external', 'stream'"):
        Streams(SimulatedBackend(), policy="fast")
    with pytest.raises(ConfigError, match="needs external events"):
        Streams(SimulatedBackend(external_events="it is old"), policy="external")


def test_one_consumer_is_not_a_string_of_many() -> None:
    with pytest.raises(HandoffError, match="consumers is the string 'conversion'"):
        Handoff(Streams(SimulatedBackend()), "ready", producer="indexer", consumers="conversion")


@pytest.mark.parametrize("use", ["publish", "wait"])
def test_a_handoff_in_a_capture_of_other_streams_is_refused(use: str) -> None:
    machine = Machine()
    others = Streams(machine.backend)
    ready = machine.handoff()
    if use == "wait":
        ready.publish()
    with (
        machine.on_compute(),
        others.capture("theirs"),
        pytest.raises(HandoffError, match="which a capture records that other Streams began"),
    ):
        getattr(ready, use)()
