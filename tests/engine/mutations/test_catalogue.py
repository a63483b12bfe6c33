"""Every seeded fault of the engine's own code is found, with both of its sides; the engine as it is reports nothing."""

from __future__ import annotations

import pytest

from sidestream.streams.simulated import Order
from tests.engine.mutations.conftest import Subject
from tests.engine.mutations.fault import Fault
from tests.engine.mutations.graph_faults import CAPTURES, OTHER_STREAMS, UPLOADS
from tests.engine.mutations.handoff_faults import CONVERSION, PUBLISHING
from tests.engine.mutations.sites import Edit, apply
from tests.engine.mutations.subject import MODELS, Workload

FAULTS = (*CONVERSION, *PUBLISHING, *OTHER_STREAMS, *CAPTURES, *UPLOADS)

MODES = ("none", "piecewise", "full_and_piecewise")
CLEAN = {
    "orders": [Workload(mode, order=order) for mode in MODES for order in (Order.INLINE, Order.LAZY, Order.RANDOM)],
    "whole-stream waits": [Workload(mode, policy="stream") for mode in MODES],
    **{model: [Workload(mode, model, Order.RANDOM) for mode in MODES] for model in MODELS if model != "DS"},
}


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_found(fault: Fault, subject: Subject) -> None:
    clean = subject.clean(fault.work)
    assert clean.clean, str(clean)
    with pytest.MonkeyPatch.context() as patch:
        apply(fault.edits, patch)
        outcome = subject.serve(fault.work)
    assert fault.finding.seen_in(outcome, clean), f"{fault.finding} is not what was found:\n{outcome}"


@pytest.mark.parametrize("name", CLEAN)
def test_the_engine_itself_is_clean_and_gives_the_same_bits(name: str, subject: Subject) -> None:
    first = subject.clean(CLEAN[name][0])
    for work in CLEAN[name]:
        outcome = subject.clean(work)
        assert outcome.clean, f"{work}\n{outcome}"
        assert outcome.tokens == first.tokens, f"{work}\n{outcome}"


RIGHT = {
    "groups share their buffers": Edit(
        "attention/index_group.py",
        "SparseMLAIndexGroup.__init__",
        "self._decode_buffers = self._buffers(decode_rows)",
        "self._decode_buffers = vars(streams).setdefault('buffers', self._buffers(decode_rows))",
    ),
    "inputs of a break left in the segment, which the break keeps alive": Edit(
        "layers/boundary.py", "_hold", 'boundary.hold(f"{kind}, input {i}", x)', "x"
    ),
}
"""Edits after which everything is still ordered: they cost memory or save it."""


@pytest.mark.parametrize("name", RIGHT)
def test_an_edit_that_is_right_is_not_reported(name: str, subject: Subject) -> None:
    work = Workload("piecewise", "DSD", Order.RANDOM)
    clean = subject.clean(work)
    with pytest.MonkeyPatch.context() as patch:
        apply([RIGHT[name]], patch)
        outcome = subject.serve(work)
    assert outcome.clean, str(outcome)
    assert outcome == clean, str(outcome)


def test_no_finding_is_seen_in_the_engine_as_it_is(subject: Subject) -> None:
    for fault in FAULTS:
        clean = subject.clean(fault.work)
        assert not fault.finding.seen_in(clean, clean), fault.name


def test_the_catalogue_is_large_enough() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20
