"""The checker against brute force: on random programs it finds a fault exactly if two accesses really conflict."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.streams import Event
from sidestream.streams.simulated import Order, SimulatedBackend

ROWS, COLUMNS, STREAMS = 4, 6, 3


@dataclass(frozen=True)
class Step:
    """Write or read a rectangle on a stream, or record and wait (``event`` = which one)."""

    kind: str
    stream: int
    event: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    step: int


def spans(limit: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, limit - 1), st.integers(1, limit)).map(lambda p: (p[0], min(p[0] + p[1], limit)))


steps = st.lists(
    st.builds(
        Step,
        kind=st.sampled_from(["write", "write", "read", "record", "wait", "host waits"]),
        stream=st.integers(0, STREAMS - 1),
        event=st.integers(0, 1),
        rows=spans(ROWS),
        columns=spans(COLUMNS),
        step=st.integers(1, 2),
    ),
    min_size=2,
    max_size=14,
)


def conflicts(program: list[Step]) -> bool:
    """By reachability over all earlier steps and sets of elements, without clocks."""
    before: list[set[int]] = []  # what each access follows
    last: list[set[int]] = [set() for _ in range(STREAMS)]
    events: list[set[int]] = [set(), set()]
    host: set[int] = set()
    accesses: list[tuple[int, bool, set[tuple[int, int]]]] = []
    for step in program:
        if step.kind == "record":
            events[step.event] = set(last[step.stream])
        elif step.kind == "wait":
            last[step.stream] |= events[step.event]
        elif step.kind == "host waits":
            host |= events[step.event]
        else:
            cells = {(r, c) for r in range(*step.rows, step.step) for c in range(*step.columns)}
            number = len(before)
            follows = last[step.stream] | host
            before.append(follows)
            for other, wrote, touched in accesses:
                if other not in follows and (wrote or step.kind == "write") and touched & cells:
                    return True
            accesses.append((number, step.kind == "write", cells))
            last[step.stream] = follows | {number}
    return False


def run(program: list[Step], order: Order, seed: int) -> tuple[SimulatedBackend, torch.Tensor]:
    backend = SimulatedBackend(order, seed=seed)
    streams = [backend.new_stream(f"stream {i}") for i in range(STREAMS)]
    events: list[Event] = [backend.new_event(external=bool(i)) for i in range(2)]
    x = torch.zeros(ROWS, COLUMNS, device="sim")
    backend.synchronize()
    kept = []
    for number, step in enumerate(program):
        with backend.use(streams[step.stream]):
            part = x[slice(*step.rows, step.step), slice(*step.columns)]
            if step.kind == "write":
                part.fill_(number)
            elif step.kind == "read":
                kept.append(part + 0)
            elif step.kind == "record":
                backend.record(events[step.event])
            elif step.kind == "wait":
                backend.wait(events[step.event])
            else:
                backend.synchronize_event(events[step.event])
    backend.synchronize()
    return backend, torch.cat([x.cpu().reshape(-1), *(part.cpu().reshape(-1) for part in kept)])


@settings(max_examples=150, deadline=None)
@given(program=steps, seed=st.integers(0, 1000))
def test_a_hazard_is_found_exactly_if_there_is_one(program: list[Step], seed: int) -> None:
    racy = conflicts(program)
    for order in (Order.INLINE, Order.LAZY, Order.RANDOM):
        backend, _ = run(program, order, seed)
        assert bool(backend.hazards()) == racy


@settings(max_examples=60, deadline=None)
@given(program=steps, seed=st.integers(0, 1000))
def test_without_a_hazard_every_order_gives_the_same_values(program: list[Step], seed: int) -> None:
    if conflicts(program):
        return
    _, wanted = run(program, Order.INLINE, 0)
    for order in (Order.LAZY, Order.RANDOM):
        _, found = run(program, order, seed)
        assert torch.equal(wanted, found)


def history(tensor: torch.Tensor) -> int:
    """Accesses that later ones would be checked against."""
    return len(tensor.storage_owner.block.history)  # type: ignore[attr-defined]


def test_what_the_host_waited_for_is_forgotten() -> None:
    backend = SimulatedBackend(Order.LAZY)
    x = torch.zeros(50, 4, device="sim")
    for i in range(50):
        x[i].fill_(i)
    assert history(x) == 51
    backend.synchronize()
    x[0].fill_(1)
    assert history(x) == 1


def test_what_a_later_access_stands_for_is_forgotten() -> None:
    SimulatedBackend(Order.LAZY)
    x = torch.zeros(4, 4, device="sim")
    for i in range(50):
        x[1:3].fill_(i)
        x.add_(1)
    assert history(x) <= 2  # add_ reads and writes
    for _ in range(50):
        x.sum()
    assert history(x) <= 3
