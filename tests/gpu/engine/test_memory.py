"""The memory limit is a promise about the driver's own figure, and ready means that nothing compiles any more."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.gpu.engine.machine import REPOSITORY

pytestmark = pytest.mark.gpu
GIB = 2**30


@pytest.mark.parametrize("limit", [40, 80, 120])
def test_slice_a_stays_within_its_limit_and_compiles_nothing(limit: int) -> None:
    command = [sys.executable, "-m", "tests.gpu.engine.mixed_load", f"{limit}GiB", "5"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(found, indent=1))
    for ledger in (found["at_ready"], found["ledger"]):
        assert ledger["in_use"] <= ledger["budget"] == limit * GIB
        assert ledger["measured"] == pytest.approx(ledger["in_use"], rel=0.03)
        assert ledger["predicted"] <= ledger["budget"]
    assert found["load"]["most_in_use"] <= limit * GIB
    graphs = found["ledger"]["parts"]["graph pool"]
    static = found["ledger"]["parts"]["static buffers"]
    predicted, measured = (graphs[name] + static[name] for name in ("predicted", "measured"))
    assert predicted == pytest.approx(measured, rel=0.1)
    if limit == 40:  # the caches fill it
        assert found["ledger"]["measured"] > 0.95 * limit * GIB
    assert found["load"]["steps"] > 100
    assert found["late"] == []


def test_too_small_a_limit_is_refused_before_weights_are_loaded() -> None:
    command = [sys.executable, "-m", "tests.gpu.engine.mixed_load", "25GiB", "1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode != 0
    assert "CapacityError" in done.stderr
    assert "raise memory_limit" in done.stderr
    assert "load_model" not in done.stderr
