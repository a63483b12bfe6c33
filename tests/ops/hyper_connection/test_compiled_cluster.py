"""What the launch of clusters compiles to, which needs no GPU: two meetings of a cluster, and what is between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon")

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.ops.hyper_connection.compiled_cluster"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels: dict[str, Any] = json.loads(done.stdout)
    assert len(kernels) == 17
    return kernels


def test_a_cluster_meets_twice_around_what_its_processors_tell_each_other(compiled: dict[str, Any]) -> None:
    for name, kernel in compiled.items():
        found = kernel["events"]
        assert "other" not in found, name
        assert [found.count(kind) for kind in ("wait", "arrive", "meet")] == [1, 2, 2], name
        first, second = (i for i, kind in enumerate(found) if kind == "arrive")
        assert found.index("wait") < found.index("store"), name
        assert "load" not in found[:first], name
        assert found[first : first + 3] == ["arrive", "meet", "load"], name  # nothing in between
        assert set(found[first + 3 : second]) | {"barrier"} == {"barrier", "store"}, name
        # One warp iterates there and stores: a barrier would wait for it, or for ever.
        assert found[second:] == ["arrive", "store", "meet", "load", "store"], name


def test_each_meeting_orders_memory(compiled: dict[str, Any]) -> None:
    """What was written is in the L2 cache before, and lines of a processor's own cache are gone behind."""
    once = ["MEMBAR.ALL.GPU", "UCGABAR_ARV", "UCGABAR_WAIT", "CCTL.IVALL"]
    for name, kernel in compiled.items():
        assert kernel["meetings"] == 2 * once, name


def test_registers_hold_it(compiled: dict[str, Any]) -> None:
    spilled = {name for name, kernel in compiled.items() if max(kernel["spilled"]) > 4}
    assert all(name.startswith("16 rows") for name in spilled)
    assert all(kernel["registers"] <= 128 for name, kernel in compiled.items() if name != "half as wide")


def test_shared_memory_is_a_processors_own(compiled: dict[str, Any]) -> None:
    """And two fit where factors are in it. Triton takes that of all processors together for a conversion."""
    for name, kernel in compiled.items():
        assert kernel["shared"] <= (112 if "held" in name else 32) << 10, name
