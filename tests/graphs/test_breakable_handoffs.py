"""Handoffs across the segments and breaks of one capture, under both policies: what orders, and what is refused."""

from __future__ import annotations

import pytest

from sidestream.errors import HandoffError
from sidestream.graphs.breakable import BreakableCUDAGraphCapture
from sidestream.streams import Policy, WaitKind
from tests.graphs.pieces import break_here
from tests.streams.programs import ORDERS, Machine


@pytest.fixture(params=ORDERS, ids=lambda p: f"{p[0].value}-{p[1]}-{p[2]}")
def ordered(request: pytest.FixtureRequest, policy: Policy) -> Machine:
    return Machine(*request.param, policy=policy)


@pytest.fixture(params=list(Policy), ids=lambda policy: policy.value)
def policy(request: pytest.FixtureRequest) -> Policy:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def machine(policy: Policy) -> Machine:
    return Machine(policy=policy)


def test_a_break_waits_on_the_side_stream_for_its_segment_and_the_next_segment_for_the_break(ordered: Machine) -> None:
    """The founding fault's shape: top-k in a segment, its conversion in the break, attention in the next segment."""
    machine = ordered
    ready, back = machine.handoff(), machine.handoff("converted", ("attention",))
    x, y, z = (machine.buffer(4) for _ in range(3))

    def convert() -> None:
        with machine.on_side():
            ready.wait()
            y.copy_(x + 100)
            back.publish()

    with machine.on_compute():
        x.fill_(1)
        with BreakableCUDAGraphCapture(machine.streams, "pieces") as capture:
            x.add_(1)
            ready.publish()
            break_here(convert, "conversion")
            back.wait()
            z.copy_(y)
        first, second = capture.segments
        assert (first.published, first.awaited) == (("topk_ready",), ())
        assert (second.published, second.awaited) == ((), ("converted",))
        assert machine.read(z) == [102.0] * 4
        for step in (3, 4):
            machine.streams.begin_step()
            capture.replay()
            assert machine.read(z) == [100.0 + step] * 4
    crossing = WaitKind.EXTERNAL_EVENT if machine.policy is Policy.EXTERNAL else WaitKind.WHOLE_STREAM
    assert ready.waits == {crossing: 3}
    machine.backend.check()


def test_a_segment_waits_for_what_an_earlier_segment_published(ordered: Machine) -> None:
    machine = ordered
    ready, fork = machine.handoff(), machine.handoff("fork", ("conversion",))
    back = machine.handoff("converted", ("attention",))
    x, y, z = (machine.buffer(4) for _ in range(3))
    with machine.on_compute():
        with BreakableCUDAGraphCapture(machine.streams, "pieces") as capture:
            x.add_(1)
            ready.publish()
            break_here(lambda: None, "nothing")
            fork.publish()  # the side stream joins the second segment by an edge, the first segment's event is a node
            with machine.on_side():
                fork.wait()
                ready.wait()
                y.copy_(x * 10)
                back.publish()
            back.wait()
            z.copy_(y)
        assert capture.segments[0].published == ("topk_ready",)
        assert capture.segments[1].published == ("fork", "converted")
        assert capture.segments[1].awaited == ("topk_ready",)
        for step in (2, 3):
            machine.streams.begin_step()
            capture.replay()
            assert machine.read(z) == [10.0 * step] * 4
    machine.backend.check()


def test_a_break_that_waits_for_what_no_segment_published_is_refused(machine: Machine) -> None:
    ready = machine.handoff()
    capture = BreakableCUDAGraphCapture(machine.streams, "pieces")
    refused = pytest.raises(HandoffError, match="'indexer' to 'conversion': it was never published")
    with refused as raised, machine.on_compute(), capture:
        break_here(ready.wait, "conversion")
    assert raised.value.__notes__ == ["in break 'conversion' behind segment 0 of capture 'pieces'"]


def test_a_wait_for_what_only_a_later_segment_publishes_is_refused_at_replay_too(machine: Machine) -> None:
    """An earlier step published it, but this one has not yet."""
    ready, x, waits = machine.handoff(), machine.buffer(4), [False]

    def body() -> None:
        if waits[0]:
            ready.wait()

    with machine.on_compute():
        with BreakableCUDAGraphCapture(machine.streams, "pieces") as capture:
            break_here(body, "conversion")
            x.add_(1)
            ready.publish()
        waits[0] = True
        machine.streams.begin_step()
        with pytest.raises(HandoffError, match="not published in step 2; the last time was in step 1") as raised:
            capture.replay()
    assert raised.value.__notes__ == ["in eager break 'conversion' of capture 'pieces'"]


def test_two_segments_may_not_publish_the_same_handoff(machine: Machine) -> None:
    ready, x = machine.handoff(), machine.buffer(4)

    def forward() -> None:
        x.add_(1)
        ready.publish()
        break_here(lambda: None, "nothing")
        ready.publish()

    capture = BreakableCUDAGraphCapture(machine.streams, "pieces")
    refused = pytest.raises(HandoffError, match=r"published twice in step 1, .* in Capture\('pieces, segment 0'\)")
    with refused as raised, machine.on_compute(), capture:
        forward()
    assert raised.value.__notes__ == ["in segment 1, behind break 'nothing' of capture 'pieces'"]


def test_a_capture_is_a_step_so_a_replay_needs_another_one(machine: Machine) -> None:
    ready, x = machine.handoff(), machine.buffer(4)
    with machine.on_compute():
        with BreakableCUDAGraphCapture(machine.streams, "pieces") as capture:
            x.add_(1)
            ready.publish()
        with pytest.raises(HandoffError, match="published twice in step 1"):
            capture.replay()
        machine.streams.begin_step()
        capture.replay()
    assert machine.read(x) == [2.0] * 4


def test_a_segment_does_not_follow_the_publish_of_another_shape(machine: Machine) -> None:
    """Each capture records events of its own; a segment that waits on one cannot follow another shape's."""
    ready, x = machine.handoff(), machine.buffer(4)
    captures = []
    with machine.on_compute():
        for name in ("large", "small"):
            machine.streams.begin_step()
            with BreakableCUDAGraphCapture(machine.streams, name) as capture:
                x.add_(1)
                ready.publish()
                break_here(lambda: None, "nothing")
                ready.wait()
                x.mul_(2)
            captures.append(capture)
        large, small = captures
        machine.streams.begin_step()
        large.segments[0].replay()
        with pytest.raises(HandoffError, match=r"waits for what is published by Capture\('small, segment 0'\)"):
            small.segments[1].replay()
        machine.streams.begin_step()
        small.replay()
    assert machine.read(x) == [16.0] * 4  # 2, 6, then 7 by the large one's first segment, then 8 * 2
