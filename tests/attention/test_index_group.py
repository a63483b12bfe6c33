"""Index groups on the simulated device: right rows in every mode, fine-grained waits, and misuse that is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sidestream.attention.index_group import SparseMLAIndexGroup, SparseMLAIndexGroupBuilder
from sidestream.errors import ConfigError
from sidestream.streams import Policy, WaitKind
from sidestream.streams.simulated import Order
from tests.attention.group_machine import DECODE_ROWS, WIDTH, GroupMachine, Recorder, Taken, check

SHAPES = {
    "one layer": ((0,),),
    "two layers": ((0, 1),),
    "four layers": ((2, 3, 4, 5),),
    "two groups": ((0,), (1, 2)),
}
POLICIES = (Policy.EXTERNAL, Policy.STREAM)
STARVED = ((Order.STARVED, "index groups"), (Order.STARVED, "compute"), (Order.LAZY, None))


@pytest.fixture(params=list(SHAPES.values()), ids=list(SHAPES))
def groups(request: pytest.FixtureRequest) -> tuple[tuple[int, ...], ...]:
    return request.param  # type: ignore[no-any-return]


# The rows are right


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_the_reference_s_at_piecewise_capture_and_at_fifty_replays(
    groups: tuple[tuple[int, ...], ...], policy: Policy
) -> None:
    machine = GroupMachine(groups, policy=policy)
    with machine.on_compute():
        pieces = machine.capture_pieces()
        check(machine.results(), machine.expected())
        for replay in range(50):
            machine.begin_decode(replay)
            pieces.replay(machine.step_inputs().static_tensors())
            if replay in (0, 1, 49):
                check(machine.results(), machine.expected())
    machine.backend.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_the_reference_s_in_a_full_graph(groups: tuple[tuple[int, ...], ...], policy: Policy) -> None:
    machine = GroupMachine(groups, policy=policy)
    with machine.on_compute():
        whole = machine.capture_whole()
        check(machine.results(), machine.expected())
        for replay in range(50):
            machine.begin_decode(replay)
            whole.replay()
            if replay in (0, 1, 49):
                check(machine.results(), machine.expected())
    machine.backend.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_the_reference_s_without_graphs(groups: tuple[tuple[int, ...], ...], policy: Policy) -> None:
    machine = GroupMachine(groups, policy=policy)
    with machine.on_compute():
        for step in range(5):
            machine.begin_decode(step)
            machine.forward()
            check(machine.results(), machine.expected())
    machine.backend.check()


@pytest.mark.parametrize(("order", "starved"), STARVED, ids=lambda value: str(value))
@pytest.mark.parametrize("policy", POLICIES)
def test_a_starved_stream_changes_nothing(order: Order, starved: str | None, policy: Policy) -> None:
    """Sizes 1, 2 and 8 captured side by side, largest first, then steps that change between them and eager ones."""
    machine = GroupMachine(((0, 1), (2,)), order=order, starved=starved, policy=policy)
    with machine.on_compute():
        pieces = {rows: machine.capture_pieces(rows=rows) for rows in (8, 2, 1)}
        wholes = {rows: machine.capture_whole(rows=rows) for rows in (8, 2, 1)}
        for step, rows in enumerate((8, 1, 2, 2, 8, 1)):
            for run in (pieces[rows].replay, wholes[rows].replay, machine.forward):
                machine.begin_decode(step, rows=rows, live=min(3, rows))
                run()
                check(machine.results(), machine.expected())
    machine.backend.check()


def test_a_step_is_not_read_back_before_the_next_one_begins() -> None:
    """Steps one behind the other, without the host in between: buffers are rewritten while work is still queued."""
    machine = GroupMachine(((0, 1),), order=Order.STARVED, starved="index groups")
    with machine.on_compute():
        pieces = machine.capture_pieces()
        for replay in range(10):
            machine.begin_decode(replay)
            pieces.replay()
        check(machine.results(), machine.expected())
    machine.backend.check()


# What waits become


Waits = dict[WaitKind, int]


def waits(machine: GroupMachine) -> list[tuple[Waits, Waits]]:
    """Since the machine was made, of each group: of its logical and of its physical handoff."""
    return [(dict(g.logical_topk_ready.waits), dict(g.physical_topk_ready.waits)) for g in machine.groups]


def run_eager(machine: GroupMachine) -> None:
    machine.begin_decode(1)
    machine.forward()
    machine.begin_decode(2)
    machine.forward()


def run_piecewise(machine: GroupMachine) -> None:
    pieces = machine.capture_pieces()
    machine.begin_decode(1)
    pieces.replay()


def run_full(machine: GroupMachine) -> None:
    whole = machine.capture_whole()
    machine.begin_decode(1)
    whole.replay()


RUNS: dict[str, tuple[Callable[[GroupMachine], None], Waits, Waits]] = {
    "eager": (run_eager, {WaitKind.EVENT: 2}, {WaitKind.EVENT: 2}),
    "piecewise": (run_piecewise, {WaitKind.EXTERNAL_EVENT: 2}, {WaitKind.EVENT: 2}),
    "full": (run_full, {WaitKind.EDGE: 1}, {WaitKind.EDGE: 1}),  # a graph waits by itself when it is replayed
}
"""What runs twice; what the waits on the top-k and on the rows become with external events."""


@pytest.mark.parametrize("mode", RUNS)
def test_no_wait_is_for_a_whole_stream(mode: str, groups: tuple[tuple[int, ...], ...]) -> None:
    """A group waits once a step, however many layers it has, and for the publish alone."""
    run, logical, physical = RUNS[mode]
    machine = GroupMachine(groups)
    assert machine.streams.report.policy is Policy.EXTERNAL
    with machine.on_compute():
        run(machine)
    assert waits(machine) == [(logical, physical)] * len(groups)
    machine.backend.check()


@pytest.mark.parametrize("mode", RUNS)
def test_under_policy_stream_every_wait_is_for_a_whole_stream(mode: str, groups: tuple[tuple[int, ...], ...]) -> None:
    run, logical, physical = RUNS[mode]
    taken: list[Taken] = []
    for policy in POLICIES:
        machine = GroupMachine(groups, policy=policy)
        with machine.on_compute():
            run(machine)
            taken.append(machine.results())
        machine.backend.check()
    whole = {WaitKind.WHOLE_STREAM: sum(logical.values())}, {WaitKind.WHOLE_STREAM: sum(physical.values())}
    assert waits(machine) == [whole] * len(groups)
    check(*taken)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_conversion_does_not_wait_for_what_the_segment_does_behind_the_publish(policy: Policy) -> None:
    """Under policy external the side stream can finish while the compute stream is still held back; under policy
    stream it cannot. The simulated device runs the least that an event needs, so what else has run shows it."""
    resolver = Recorder()
    machine = GroupMachine(order=Order.LAZY, policy=policy, resolver=resolver)
    resolver.machine = machine
    marker = torch.zeros(4, device=machine.backend.device)
    done = machine.backend.new_event(external=False)
    machine.backend.synchronize()
    behind = machine.backend.new_event(external=False)
    with machine.on_compute():
        machine.begin_decode(1)
        machine.lead(0)
        marker.add_(1)
        machine.backend.record(behind)
        machine.attend(0)
        machine.backend.record(done)
    converted = machine.backend.new_event(external=False)
    assert resolver.stream is not None
    with machine.backend.use(resolver.stream):
        machine.backend.record(converted)
    machine.backend.synchronize_event(converted)
    assert machine.backend.event_done(behind) is (policy is Policy.STREAM)
    machine.backend.synchronize_event(done)
    assert machine.backend.event_done(behind)


# Batches beyond the decode buffer


@pytest.mark.parametrize("tokens", [DECODE_ROWS + 1, 24])
def test_a_prefill_is_resolved_inline(tokens: int, groups: tuple[tuple[int, ...], ...]) -> None:
    machine = GroupMachine(groups)
    with machine.on_compute():
        machine.begin_prefill(3, tokens=tokens)
        assert all(group.inline for group in machine.groups)
        machine.forward()
        check(machine.results(), machine.expected())
    assert waits(machine) == [({}, {})] * len(groups)
    machine.backend.check()


def test_a_batch_as_large_as_the_decode_buffer_is_not_inline() -> None:
    machine = GroupMachine()
    with machine.on_compute():
        machine.begin_prefill(3, tokens=DECODE_ROWS)
        assert not machine.groups[0].inline
        machine.forward()
        check(machine.results(), machine.expected())
    assert waits(machine) == [({WaitKind.EVENT: 1}, {WaitKind.EVENT: 1})]


def test_a_decode_behind_a_prefill_has_its_own_buffers_again() -> None:
    machine = GroupMachine(((0, 1),))
    with machine.on_compute():
        pieces = machine.capture_pieces()
        for step in range(3):
            machine.begin_prefill(step, tokens=20)
            machine.forward()
            check(machine.results(), machine.expected())
            machine.begin_decode(step)
            pieces.replay()
            check(machine.results(), machine.expected())
    machine.backend.check()


# Resolvers and builders


def test_any_resolver_takes_part_by_the_protocol() -> None:
    resolver = Recorder()
    machine = GroupMachine(((0, 1, 2),), resolver=resolver)
    resolver.machine = machine

    def expected() -> Taken:
        logical = machine.logical[0].long()
        rows = 100 * machine.step_inputs().token_rows.cpu()[: len(logical), None] + logical
        physical = torch.where(logical >= 0, rows, -1)
        return [(physical, (logical >= 0).sum(dim=1, dtype=torch.int32))] * 3

    with machine.on_compute():
        pieces = machine.capture_pieces()
        machine.begin_decode(1)
        pieces.replay()
        check(machine.results(), expected())
        machine.begin_prefill(2, tokens=20)
        machine.forward()
        check(machine.results(), expected())
    assert resolver.calls == [(4, "index groups"), (4, "index groups"), (20, "compute")]  # once a step, not a layer
    machine.backend.check()


def test_layers_behind_a_leader_share_its_group() -> None:
    machine = GroupMachine(((1,), (3, 4), (7, 8, 9)))
    assert [group.layers for group in machine.groups] == [(1,), (3, 4), (7, 8, 9)]
    assert all(isinstance(group, SparseMLAIndexGroup) for group in machine.groups)


def test_a_follower_without_a_leader_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer 3 shares a top-k, but no layer before it produces one"):
        SparseMLAIndexGroupBuilder().register_layer(3, is_index_producing_layer=False)


def test_each_group_has_buffers_of_its_own() -> None:
    machine = GroupMachine(((0,), (1,)))
    with machine.on_compute():
        machine.begin_decode(1, rows=DECODE_ROWS, live=8)
        first, second = (group.logical_topk_indices for group in machine.groups)
    assert first.shape == second.shape == (DECODE_ROWS, WIDTH)
    assert first.dtype == second.dtype == torch.int32
    second.fill_(-1)
    first.fill_(3)
    machine.backend.synchronize()
    assert set(second.reshape(-1).tolist()) == {-1}
