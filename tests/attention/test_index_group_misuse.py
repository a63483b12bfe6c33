"""What an index group refuses, and what the simulated device reports: nothing is read too early in silence."""

from __future__ import annotations

import pytest

from sidestream.errors import HandoffError
from sidestream.graphs.breakable import BreakableCUDAGraphCapture
from sidestream.streams.simulated import HazardError
from tests.attention.group_machine import GroupMachine

BOTH_SIDES = r"'indexer of layer 3' to 'conversion for layers \(3, 4\)'"


@pytest.mark.parametrize("tokens", [4, 20])
def test_attending_before_the_leader_published_names_both_sides(tokens: int) -> None:
    """Inline or not: the publish is asserted."""
    machine = GroupMachine(((3, 4),))
    with machine.on_compute():
        machine.begin_prefill(1, tokens=tokens)
        with pytest.raises(HandoffError, match=BOTH_SIDES + ".*never published"):
            machine.attend(3)


@pytest.mark.parametrize("tokens", [4, 20])
def test_last_step_s_publish_does_not_count(tokens: int) -> None:
    machine = GroupMachine(((3, 4),))
    with machine.on_compute():
        machine.begin_prefill(1, tokens=tokens)
        machine.forward()
        machine.begin_prefill(2, tokens=tokens)
        with pytest.raises(HandoffError, match=r"'indexer of layer 3'.*not published in step 2; .* in step 1"):
            machine.attend(4)


def test_attending_in_a_capture_before_the_leader_names_both_sides_and_the_break(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = GroupMachine(((3, 4),))

    with machine.on_compute():
        inputs = machine.begin_decode(1)
        monkeypatch.setattr(machine, "lead", lambda number: None)
        capture = BreakableCUDAGraphCapture(machine.streams, "pieces", inputs=inputs.static_tensors())
        with pytest.raises(HandoffError, match=BOTH_SIDES) as caught, capture:
            machine.forward()
        assert machine.streams.open_capture is None
    assert any("attention of layer 3" in note for note in caught.value.__notes__)


def test_a_leader_publishes_once_a_step() -> None:
    machine = GroupMachine(((3, 4),))
    with machine.on_compute():
        machine.begin_decode(1)
        machine.lead(0)
        with pytest.raises(HandoffError, match="published twice"):
            machine.lead(0)


def test_a_consumer_from_outside_of_the_group_is_refused() -> None:
    machine = GroupMachine(((0, 1),))
    group = machine.groups[0]
    with machine.on_compute():
        machine.begin_decode(1)
        machine.forward()
        for handoff in (group.logical_topk_ready, group.physical_topk_ready):
            with pytest.raises(HandoffError, match="'attention of layer 2' waits, but is not one of its consumers"):
                handoff.wait("attention of layer 2")


@pytest.mark.parametrize("mode", ["eager", "piecewise"])
@pytest.mark.parametrize("which", ["logical", "physical"])
def test_a_reader_that_waits_for_nothing_is_caught(mode: str, which: str) -> None:
    """A layer on a stream of its own that takes the group's buffers without a handoff."""
    machine = GroupMachine(((0, 1),))
    elsewhere = machine.streams.new_stream("elsewhere")
    group = machine.groups[0]
    with machine.on_compute():
        run = machine.capture_pieces().replay if mode == "piecewise" else machine.forward
        machine.begin_decode(1)
        run()
        physical, _ = group.convert_logical_to_physical_topk(machine.step_inputs())
        with machine.backend.use(elsewhere):
            _ = (group.logical_topk_indices if which == "logical" else physical) + 1
    with pytest.raises(HazardError):
        machine.backend.check()
