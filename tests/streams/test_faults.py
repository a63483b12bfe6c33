"""The catalogue: every fault is found with both lines of the source; the same programs without the fault are clean."""

from __future__ import annotations

import inspect

import pytest

from sidestream.streams.simulated import DeviceError, Order
from tests.streams.faulty_programs import ORDERING, REFUSED, Program
from tests.streams.programs import ORDERS, Machine

SCHEDULES = 200


def marked(program: Program) -> tuple[int, int]:
    """Line numbers of the marks."""
    lines, start = inspect.getsourcelines(program)
    found = {mark: [start + i for i, line in enumerate(lines) if f"# {mark}" in line] for mark in ("first", "second")}
    assert all(len(places) == 1 for places in found.values()), found
    return found["first"][0], found["second"][0]


def name_of(program: Program) -> str:
    return program.__name__


@pytest.mark.parametrize("order", ORDERS, ids=lambda o: f"{o[0].value}-{o[1]}-{o[2]}")
@pytest.mark.parametrize("program", ORDERING, ids=name_of)
def test_a_fault_is_found_on_every_schedule(program: Program, order: tuple[Order, int, str | None]) -> None:
    machine = Machine(*order)
    program(machine, True)
    hazards = machine.backend.hazards()
    assert hazards, "nothing was found"
    for hazard in hazards:
        assert hazard.first.file == hazard.second.file == inspect.getsourcefile(program)
    assert marked(program) in {(hazard.first.line, hazard.second.line) for hazard in hazards}, list(map(str, hazards))


@pytest.mark.parametrize("program", REFUSED, ids=name_of)
def test_a_fault_is_refused_with_both_lines(program: Program) -> None:
    machine = Machine()
    with pytest.raises(DeviceError) as raised:
        program(machine, True)
    for line in marked(program):
        assert f"faulty_programs.py:{line} " in str(raised.value)


@pytest.mark.parametrize("program", [*ORDERING, *REFUSED], ids=name_of)
def test_the_program_without_its_fault_is_clean_on_many_schedules(program: Program) -> None:
    for seed in range(SCHEDULES):
        machine = Machine(Order.RANDOM, seed)
        program(machine, False)
        machine.backend.check()
    for order in ORDERS:
        machine = Machine(*order)
        program(machine, False)
        machine.backend.check()


def test_the_catalogue_is_large_enough() -> None:
    assert len({*ORDERING, *REFUSED}) >= 20
