"""Breakable captures on the simulated device, without the engine: order, real values at capture, replay, no-ops."""

from __future__ import annotations

import pytest
import torch

from sidestream.core.eager_break import eager_break_during_capture, recording_breaks
from sidestream.errors import GraphError
from sidestream.graphs.breakable import BreakableCUDAGraphCapture
from sidestream.streams.simulated import Order
from tests.graphs.pieces import Pieces, break_here
from tests.streams.programs import ORDERS, Machine


@pytest.fixture(params=ORDERS, ids=lambda p: f"{p[0].value}-{p[1]}-{p[2]}")
def machine(request: pytest.FixtureRequest) -> Machine:
    return Machine(*request.param)


def test_a_capture_is_a_real_step_and_replays_follow_changed_inputs(machine: Machine) -> None:
    pieces = Pieces(machine)
    capture = pieces.capture(1)
    assert pieces.seen == [("raise", 2.0), ("look", 30.0)]  # each segment was replayed before its break
    assert machine.read(pieces.result) == [30.0] * 4
    assert capture.breaks == ("raise", "look")
    assert [segment.name for segment in capture.segments] == [f"pieces, segment {i}" for i in range(3)]
    for value in (4, 5):
        machine.streams.begin_step()
        pieces.seen.clear()
        with machine.on_compute():
            pieces.given.fill_(value)
            capture.replay()
        assert pieces.seen == [("raise", 2.0 * value), ("look", 10 * (2.0 * value + 1))]
        assert machine.read(pieces.result) == [10 * (2.0 * value + 1)] * 4
    assert repr(capture) == "BreakableCUDAGraphCapture('pieces', 3 segments, ready)"
    machine.backend.check()


def test_segments_do_not_run_ahead_of_their_replay() -> None:
    """Inside the block a segment's work is recorded only; its break is the first to see it done."""
    machine = Machine(Order.INLINE)
    x, seen = machine.buffer(4), []
    with machine.on_compute(), BreakableCUDAGraphCapture(machine.streams, "pieces"):
        x.fill_(7)
        seen.append(x.elem[0].item())  # type: ignore[attr-defined]  # below the device: no host read
        break_here(lambda: seen.append(x[0].item()), "look")
    assert seen == [0.0, 7.0]


def test_a_break_takes_arguments_and_is_named_after_its_function() -> None:
    machine = Machine()
    x, y = machine.buffer(4), machine.buffer(4)

    @eager_break_during_capture
    def add(source: torch.Tensor, *, amount: float) -> None:
        y.copy_(source + amount)

    assert add.__name__ == "add"
    with machine.on_compute():
        with BreakableCUDAGraphCapture(machine.streams, "pieces") as capture:
            x.add_(1)
            add(x, amount=0.5)
        capture.replay()
    assert capture.breaks == (add.__qualname__,)
    assert machine.read(y) == [2.5] * 4


def test_a_break_inside_a_break_is_a_plain_call() -> None:
    machine = Machine()
    x = machine.buffer(4)
    with machine.on_compute():
        with BreakableCUDAGraphCapture(machine.streams, "pieces") as capture:
            break_here(lambda: break_here(lambda: x.add_(1), "inner"), "outer")
            x.mul_(3)
        assert capture.breaks == ("outer",)
        assert len(capture.segments) == 2
        capture.replay()
    assert machine.read(x) == [12.0] * 4  # (0 + 1) * 3, then (3 + 1) * 3


def test_breaks_are_plain_calls_outside_a_capture_and_in_a_full_graph() -> None:
    machine = Machine()
    x = machine.buffer(4)
    with machine.on_compute():
        break_here(lambda: x.add_(1), "eager")
        with machine.streams.capture("whole") as graph:
            break_here(lambda: x.add_(1), "in a full graph")
        assert machine.read(x) == [1.0] * 4  # recorded, not run
        graph.replay()
        graph.replay()
    assert machine.read(x) == [3.0] * 4


def test_breaks_of_a_switched_off_block_belong_to_the_segment() -> None:
    machine = Machine()
    x = machine.buffer(4)
    with machine.on_compute():
        with BreakableCUDAGraphCapture(machine.streams, "pieces") as capture, recording_breaks(None):
            break_here(lambda: x.add_(1), "off")
        assert capture.breaks == ()
        capture.replay()
    assert machine.read(x) == [2.0] * 4


@pytest.mark.parametrize("layout", ["bb", "bsb", "sbb", "bbs", "b", "s", ""])
def test_segments_may_be_empty(layout: str) -> None:
    """Two breaks in a row, a break first or last: between breaks there is always a segment, if an empty one."""
    machine = Machine(Order.RANDOM, seed=2)
    x = machine.buffer(4, value=1)

    def forward() -> None:
        for letter in layout:
            if letter == "s":
                x.mul_(3)
            else:
                break_here(lambda: x.add_(1), "add")

    with machine.on_compute():
        with BreakableCUDAGraphCapture(machine.streams, "pieces") as capture:
            forward()
        capture.replay()
    expected = 1.0
    for letter in layout * 2:
        expected = expected * 3 if letter == "s" else expected + 1
    assert machine.read(x) == [expected] * 4
    assert len(capture.breaks) == layout.count("b")
    assert len(capture.segments) == layout.count("b") + 1
    machine.backend.check()


def test_a_replay_can_check_that_inputs_lie_where_they_lay() -> None:
    machine = Machine()
    pieces = Pieces(machine)
    other = machine.buffer(4)
    capture = pieces.capture(1, inputs={"given": pieces.given, "other": other})
    pieces.seen.clear()
    with machine.on_compute():
        capture.replay({"other": other, "given": pieces.given})
        assert len(pieces.seen) == 2
        for inputs, names in (
            ({"given": other, "other": other}, "'given'"),
            ({"given": pieces.given}, "'other'"),
            ({"given": pieces.given, "other": other, "third": other}, "'third'"),
            ({"given": pieces.given[1:], "fourth": other}, "'fourth', 'given', 'other'"),
        ):
            with pytest.raises(GraphError, match=f"graph 'pieces' reads {names} at the address"):
                capture.replay(inputs)
    assert len(pieces.seen) == 2  # nothing ran


@pytest.mark.parametrize("order", [Order.LAZY, Order.RANDOM])
def test_captures_of_several_shapes_share_a_pool_largest_first(order: Order) -> None:
    machine = Machine(order)
    pool = machine.backend.new_pool()
    given, crossing, result = (machine.buffer(8) for _ in range(3))
    temporaries: dict[int, set[int]] = {}

    def forward(rows: int) -> None:
        temporary = given[:rows] + 1
        temporaries[rows] = {temporary.data_ptr()}
        crossing[:rows].copy_(temporary * rows)
        del temporary
        break_here(lambda: crossing[:rows].add_(0.5), "half")
        behind = crossing[:rows] * 2
        temporaries[rows].add(behind.data_ptr())
        result[:rows].copy_(behind)

    captures = {}
    with machine.on_compute():
        for rows in (8, 4, 1):
            with BreakableCUDAGraphCapture(machine.streams, f"{rows} rows", pool=pool) as capture:
                forward(rows)
            captures[rows] = capture
        for rows in (1, 8, 4, 8):
            machine.streams.begin_step()
            given.fill_(rows)
            result.fill_(-1)
            captures[rows].replay()
            assert machine.read(result) == [2 * ((rows + 1.0) * rows + 0.5)] * rows + [-1.0] * (8 - rows)
    assert temporaries[4] & temporaries[8], "the smaller shape should live in the larger one's memory"
    machine.backend.check()
