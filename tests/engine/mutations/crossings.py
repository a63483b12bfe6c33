"""Small programs over handoffs, for the crossings between captures that the engine's own steps do not use today."""

from __future__ import annotations

from collections.abc import Callable

from sidestream.errors import HandoffError
from sidestream.streams import Policy
from sidestream.streams.simulated import DeviceError
from tests.engine.mutations.subject import Outcome
from tests.streams.programs import Machine

Program = Callable[[Machine], None]


def inside_an_open_capture(m: Machine) -> None:
    """Published and awaited in one capture that others may wait for too."""
    ready, done, x, y = m.handoff(), m.handoff("done", ("attention",)), m.buffer(8), m.buffer(8)
    with m.on_compute():
        with m.streams.capture("segment") as segment:
            x.fill_(1)
            ready.publish()
            with m.on_side():
                ready.wait()
                y.copy_(x)
                done.publish()
            done.wait()
        segment.replay()


def from_eager_code_into_a_capture(m: Machine) -> None:
    """Published eagerly on a side stream in each step, awaited by a graph."""
    ready, x, y = m.handoff(), m.buffer(8), m.buffer(8)
    with m.on_side():
        ready.publish()
    with m.on_compute(), m.streams.capture("segment") as segment:
        ready.wait()
        y.copy_(x)
    for _ in range(2):
        m.backend.synchronize()
        m.streams.begin_step()
        with m.on_side():
            x.fill_(1)
            ready.publish()
        with m.on_compute():
            segment.replay()


def replayed_twice_in_a_step(m: Machine) -> None:
    """Wrong: a graph that publishes runs twice in one step."""
    ready, x = m.handoff(), m.buffer(8)
    with m.on_compute():
        with m.streams.capture("segment") as segment:
            x.fill_(1)
            ready.publish()
        segment.replay()
        segment.replay()


def run(program: Program, policy: Policy) -> Outcome:
    """On a new simulated device."""
    machine, error = Machine(policy=policy), None
    try:
        program(machine)
    except (HandoffError, DeviceError, AssertionError) as failure:
        error = failure
    return Outcome(error, machine.backend.hazards(), (), ())
