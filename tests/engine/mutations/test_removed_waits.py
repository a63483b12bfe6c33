"""No place that orders work can be left out: the engine runs without each in turn, and something shows it.

The places are found in the source. A new one fails here until its removal is shown to matter, or it goes.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sidestream.streams import Capture, Handoff, Policy, StreamBackend, Streams
from sidestream.streams.simulated import DeviceFaultError, SimulatedBackend
from tests.engine.mutations import crossings
from tests.engine.mutations.conftest import Subject
from tests.engine.mutations.removals import CROSSINGS, GUARDS, REMOVALS, SETTLES, Guard
from tests.engine.mutations.sites import (
    BOOKKEEPING,
    ORDERING_CALLS,
    OTHER_CALLS,
    PACKAGE,
    WITHIN_A_KERNEL,
    apply,
    places,
    remove,
)
from tests.engine.mutations.subject import Outcome, Workload
from tests.engine.sim.harness import make_model
from tests.engine.sim.test_interrupts import core_of, interrupted, raise_at
from tests.engine.sim.test_pipeline import request

PLACES = {str(place): place for place in places()}


def test_every_place_has_a_mutation() -> None:
    known = {*REMOVALS, *CROSSINGS, *GUARDS, SETTLES}
    assert len(known) == len(REMOVALS) + len(CROSSINGS) + len(GUARDS) + 1
    assert sorted(known) == sorted(PLACES), "add what the removal of a new place brings about, drop what is gone"


@pytest.mark.parametrize("path", BOOKKEEPING)
def test_bookkeeping_knows_no_device(path: str) -> None:
    """It imports neither torch nor what orders streams, and no module of the package that does."""
    waiting, seen = [PACKAGE / path], set[Path]()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        for name in imported(module):
            assert name.split(".")[0] not in ("torch", "triton"), f"{module} imports {name}"
            assert not name.startswith(("sidestream.streams", "sidestream.graphs")), f"{module} imports {name}"
            other = PACKAGE.parent / (name.replace(".", "/") + ".py")
            if other.is_relative_to(PACKAGE) and other.exists() and other not in seen:
                waiting.append(other)
    assert len(seen) > 2


def imported(module: Path) -> list[str]:
    """Modules that a file imports, and names it imports from them, anywhere in it."""
    names = []
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def test_barriers_within_kernels_come_from_the_kernel_language() -> None:
    """No handoff hides behind such a name: wherever it is used, it was imported from Gluon."""
    users = [path for path in sorted(PACKAGE.rglob("*.py")) if uses(path, WITHIN_A_KERNEL)]
    assert users
    for path in users:
        sources = {name.rpartition(".")[0] for name in imported(path) if name.rpartition(".")[2] in WITHIN_A_KERNEL}
        assert sources, path
        assert all(source.startswith("triton.experimental.gluon.") for source in sources), f"{path}: {sources}"


def uses(path: Path, names: frozenset[str]) -> bool:
    return any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(ast.parse(path.read_text())))


@pytest.mark.parametrize("kind", [Handoff, StreamBackend, Streams, Capture])
def test_every_method_of_streams_is_known_to_order_work_or_not(kind: type) -> None:
    methods = {name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}
    assert methods
    assert methods <= ORDERING_CALLS | OTHER_CALLS, methods - ORDERING_CALLS - OTHER_CALLS


@pytest.mark.parametrize("name", sorted(REMOVALS), ids=str)
def test_the_engine_without_a_place_is_found_out(name: str, subject: Subject) -> None:
    removal = REMOVALS[name]
    clean = subject.clean(removal.work)
    assert clean.clean, str(clean)
    with pytest.MonkeyPatch.context() as patch:
        remove(PLACES[name], patch)
        outcome = subject.serve(removal.work)
    assert removal.finding.seen_in(outcome, clean), f"{removal.finding} is not what was found:\n{outcome}"


@pytest.mark.parametrize("name", sorted(CROSSINGS), ids=str)
def test_a_crossing_without_a_place_is_found_out(name: str) -> None:
    crossing = CROSSINGS[name]
    clean = crossings.run(crossing.program, crossing.policy)
    assert clean.clean, str(clean)
    with pytest.MonkeyPatch.context() as patch:
        remove(PLACES[name], patch)
        outcome = crossings.run(crossing.program, crossing.policy)
    assert crossing.finding.seen_in(outcome, clean), f"{crossing.finding} is not what was found:\n{outcome}"


@pytest.mark.parametrize("name", sorted(GUARDS), ids=str)
def test_a_fault_passes_only_without_its_guard(name: str, subject: Subject) -> None:
    guard = GUARDS[name]
    refused = _faulty(guard, subject, without=None)
    assert guard.finding.seen_in(refused, refused), f"{guard.finding} is not what was found:\n{refused}"
    unguarded = _faulty(guard, subject, without=name)
    assert not guard.finding.seen_in(unguarded, unguarded), str(unguarded)


def _faulty(guard: Guard, subject: Subject, *, without: str | None) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        apply(guard.edits, patch)
        if without is not None:
            remove(PLACES[without], patch)
        if isinstance(guard.work, Workload):
            return subject.serve(guard.work)
        return crossings.run(guard.work, Policy.EXTERNAL)


@pytest.mark.parametrize("removed", [False, True])
def test_a_failed_step_that_does_not_settle_is_found_out(removed: bool, tmp_path: Path) -> None:
    """An interrupt between a conversion and the wait for it: the side stream goes on, beside the next step's upload."""
    make_model("glm_moe_dsa", tmp_path)
    core = core_of(tmp_path, "sim")
    backend = core._runner.streams.backend
    assert isinstance(backend, SimulatedBackend)
    error, hazards = None, ()
    with pytest.MonkeyPatch.context() as patch:
        raise_at(patch, Handoff, "publish", 3, after=True, only="physical_topk_ready")
        if removed:
            remove(PLACES[SETTLES], patch)
        try:
            interrupted(core, [request("a", 9, max_tokens=5), request("b", 4, max_tokens=6)])
            hazards = backend.hazards()
        except DeviceFaultError as fault:
            error = fault
    assert (error is not None or len(hazards) > 0) == removed
