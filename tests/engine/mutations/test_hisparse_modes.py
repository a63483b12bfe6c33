"""Each wait and publish of HiSparse is needed in every graph mode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.mutations.conftest import Subject
from tests.engine.mutations.removals import HISPARSE, REMOVALS
from tests.engine.mutations.sites import places, remove
from tests.engine.mutations.subject import Workload

PLACES = {str(place): place for place in places()}
HOSTED = sorted(name for name, removal in REMOVALS.items() if removal.work.hisparse)


@pytest.mark.parametrize("mode", ["piecewise", "full"])
@pytest.mark.parametrize("name", HOSTED, ids=str)
def test_no_mode_does_without(name: str, mode: str, subject: Subject) -> None:
    """What is reported depends on the mode: a hazard, a refusal, other tokens, or an overlap that is gone."""
    work = replace(REMOVALS[name].work, mode=mode)
    clean = subject.clean(work)
    assert clean.clean, str(clean)
    with pytest.MonkeyPatch.context() as patch:
        remove(PLACES[name], patch)
        outcome = subject.serve(work)
    assert not outcome.clean or outcome.handoffs != clean.handoffs or outcome.tokens != clean.tokens, str(outcome)


def test_every_ordering_call_of_hisparse_is_among_them() -> None:
    assert {name for name in PLACES if name.startswith(HISPARSE)} <= set(HOSTED)
    assert len(HOSTED) >= 8


@pytest.mark.parametrize(("model", "policy"), [("DS", "stream"), ("DSD", "auto"), ("KD", "auto")])
def test_all_modes_give_the_same_bits_without_a_hazard(model: str, policy: str, subject: Subject) -> None:
    """Groups with a follower, with another group behind them, and behind linear attention."""
    first = subject.clean(Workload("none", model, hisparse=True))
    for mode in ("none", "piecewise", "full"):
        outcome = subject.clean(Workload(mode, model, policy=policy, hisparse=True))
        assert outcome.clean, str(outcome)
        assert outcome.tokens == first.tokens, str(outcome)
