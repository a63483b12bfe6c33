"""When a breakable capture fails, anywhere: nothing stays half open, the message says where, a new capture works."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sidestream.core import eager_break
from sidestream.errors import GraphError
from sidestream.graphs.breakable import BreakableCUDAGraphCapture
from sidestream.streams.simulated import DeviceError
from tests.graphs.pieces import Pieces, break_here
from tests.streams.programs import Machine

Action = Callable[[], object]


class BrokenError(Exception):
    """What the bodies below raise."""


def fail() -> None:
    raise BrokenError("broken")


def good_break() -> None:
    break_here(lambda: None, "good")


def bad_break() -> None:
    break_here(fail, "bad")


def swallowed_bad_break() -> None:
    with pytest.raises(BrokenError):
        bad_break()


def capture_fails(machine: Machine, error: type[Exception], match: str, *actions: Action) -> str:
    """Capture one operator before each action; see it fail with ``error`` and leave nothing. The note on the error."""
    x = machine.buffer(4)
    capture = BreakableCUDAGraphCapture(machine.streams, "pieces")

    def forward() -> None:
        for action in actions:
            x.add_(1)
            action()

    with pytest.raises(error, match=match) as raised, machine.on_compute(), capture:
        forward()
    assert_failed(capture)
    assert_usable_again(machine)
    (note,) = raised.value.__notes__
    return note


def assert_failed(capture: BreakableCUDAGraphCapture) -> None:
    """It holds nothing and can be neither replayed nor captured again."""
    assert capture.segments == ()
    assert capture.breaks == ()
    with pytest.raises(GraphError, match="'pieces' is failed and cannot be replayed"):
        capture.replay()
    with pytest.raises(GraphError, match="'pieces' is failed; make another one"), capture:
        pass


def assert_usable_again(machine: Machine) -> None:
    """No capture is open anywhere, and the same streams capture and replay."""
    assert eager_break._RECORDER.get() is None
    assert machine.streams.open_capture is None
    assert not machine.backend.is_capturing()
    machine.streams.begin_step()
    pieces = Pieces(machine)
    capture = pieces.capture(1)
    with machine.on_compute():
        pieces.given.fill_(2)
        capture.replay()
    assert machine.read(pieces.result) == [50.0] * 4
    machine.backend.check()


@pytest.mark.parametrize(
    ("actions", "place"),
    [
        ((fail,), "segment 0"),
        ((good_break, fail), "segment 1, behind break 'good'"),
        ((bad_break,), "break 'bad' behind segment 0"),
        ((good_break, bad_break), "break 'bad' behind segment 1"),
    ],
)
def test_an_error_says_where_it_happened(actions: tuple[Action, ...], place: str) -> None:
    assert capture_fails(Machine(), BrokenError, "broken", *actions) == f"in {place} of capture 'pieces'"


@pytest.mark.parametrize(
    ("before", "after", "place"),
    [
        ((), (), "segment 0"),
        ((good_break,), (), "segment 1, behind break 'good'"),
        ((), (bad_break,), "segment 0"),  # the break that ends the segment finds it, and never runs
    ],
)
def test_an_unjoined_stream_is_found_where_its_segment_ends(
    before: tuple[Action, ...], after: tuple[Action, ...], place: str
) -> None:
    machine = Machine()
    ready, y = machine.handoff(), machine.buffer(4)

    def leave_side_unjoined() -> None:
        ready.publish()
        with machine.on_side():
            ready.wait()
            y.add_(1)

    note = capture_fails(machine, DeviceError, "unjoined work", *before, leave_side_unjoined, *after)
    assert note == f"in {place} of capture 'pieces'"


def test_a_host_read_in_a_segment_is_refused_and_named() -> None:
    machine = Machine()
    x = machine.buffer(4)
    refused = "not permitted when stream is capturing"
    note = capture_fails(machine, DeviceError, refused, good_break, lambda: x.sum().item())
    assert note == "in segment 1, behind break 'good' of capture 'pieces'"


def test_a_block_that_swallows_the_error_of_a_break_does_not_make_a_capture() -> None:
    capture_fails(Machine(), GraphError, "'pieces' has no open segment", swallowed_bad_break)
    outside = "break 'good' outside of a segment"
    capture_fails(Machine(), GraphError, outside, swallowed_bad_break, good_break)


def test_a_break_on_another_stream_is_refused() -> None:
    """Ending the capture from there would leave it open on the stream that it began on."""
    machine = Machine()

    def elsewhere() -> None:
        with machine.on_side():
            bad_break()

    note = capture_fails(machine, GraphError, "'bad' is called on stream 'side'", elsewhere)
    assert note == "in segment 0 of capture 'pieces'"


def test_a_break_that_leaves_another_stream_current_is_told_so() -> None:
    machine = Machine()
    side = machine.backend.use(machine.side)

    def leaves() -> None:
        break_here(lambda: side.__enter__(), "leaves")

    try:
        note = capture_fails(machine, GraphError, "'leaves' left stream 'side' current", leaves)
    finally:
        side.__exit__(None, None, None)
    assert note == "in break 'leaves' behind segment 0 of capture 'pieces'"


def test_a_capture_inside_another_fails_both() -> None:
    machine = Machine()
    inner = BreakableCUDAGraphCapture(machine.streams, "inner")
    capture_fails(machine, GraphError, "capture 'inner, segment 0' inside", inner.__enter__)


def test_a_capture_that_cannot_begin_leaves_the_one_around_it_alone() -> None:
    machine = Machine()
    x = machine.buffer(4)
    capture = BreakableCUDAGraphCapture(machine.streams, "pieces")
    with machine.on_compute():
        with machine.streams.capture("whole") as graph:
            with pytest.raises(GraphError, match=r"inside Capture\('whole'\)"), capture:
                pass
            assert eager_break._RECORDER.get() is None
            x.add_(1)
        graph.replay()
    assert machine.read(x) == [1.0] * 4
    assert_failed(capture)
    assert_usable_again(machine)


@pytest.mark.parametrize(("action", "ran"), [(fail, 4), (bad_break, 6)])
def test_the_pool_of_a_failed_capture_serves_the_next_one(action: Action, ran: int) -> None:
    """The failed one may have been the first to use it, or come between others.

    ``ran``: how often the segment did, by two captures, two replays, and where a break failed behind it.
    """
    machine = Machine()
    pool, x, captures = machine.backend.new_pool(), machine.buffer(4), []

    def forward(then: Action) -> None:
        good_break()
        x.add_(torch.ones(4, device="sim") * 2)  # a temporary of the pool
        then()

    with machine.on_compute():
        for then in (action, good_break, action, good_break):
            capture = BreakableCUDAGraphCapture(machine.streams, "pieces", pool=pool)
            if then is action:
                with pytest.raises(BrokenError), capture:
                    forward(then)
            else:
                with capture:
                    forward(then)
                captures.append(capture)
        for capture in captures:
            capture.replay()
    assert machine.read(x) == [2.0 * ran] * 4
    machine.backend.check()


def test_a_failed_replay_names_the_break_and_the_next_replay_is_whole() -> None:
    machine = Machine()
    x, y, broken = machine.buffer(4), machine.buffer(4), [False]

    def body() -> None:
        if broken[0]:
            raise BrokenError
        y.copy_(x)

    with machine.on_compute():
        with BreakableCUDAGraphCapture(machine.streams, "pieces") as capture:
            x.add_(1)
            break_here(body, "copy")
            y.mul_(2)
        broken[0] = True
        with pytest.raises(BrokenError) as raised:
            capture.replay()
        assert raised.value.__notes__ == ["in eager break 'copy' of capture 'pieces'"]
        assert eager_break._RECORDER.get() is None
        assert machine.streams.open_capture is None
        broken[0] = False
        capture.replay()
    assert machine.read(y) == [6.0] * 4  # x was raised three times, then doubled
    assert_usable_again(machine)


def test_a_capture_is_made_once_and_replayed_only_when_made() -> None:
    machine = Machine()
    capture = BreakableCUDAGraphCapture(machine.streams, "pieces")
    with pytest.raises(GraphError, match="is new and cannot be replayed"):
        capture.replay()
    with machine.on_compute():
        with capture, pytest.raises(GraphError, match="is open and cannot be replayed"):
            capture.replay()
        with pytest.raises(GraphError, match="'pieces' is ready; make another one"), capture:
            pass
        capture.replay()
    with pytest.raises(GraphError, match="break 'late' outside of a segment of capture 'pieces'"):
        capture.add_eager(lambda: None, name="late")
    assert_usable_again(machine)
