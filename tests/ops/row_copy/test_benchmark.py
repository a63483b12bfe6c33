"""The benchmark of row copies and residency, with everything small and a clock that stands still."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.kernels import bench_residency as bench
from sidestream.ops.residency.triton_resolve import ResolvePlan
from sidestream.ops.row_copy.triton_copy import CopyPlan
from tests.ops.triton_mode import DEVICE


def test_it_runs_to_its_end_and_names_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    us = itertools.count(1)

    def graph_us(call: Callable[[int], None]) -> float:
        for i in range(bench.CALLS):
            call(i)
        return float(next(us))

    out = tmp_path / "out.json"
    plans = [CopyPlan(), CopyPlan(rows=2, programs=2, early=True, vectors=True), CopyPlan(programs=2048)]
    for name, value in (
        ("DEVICE", DEVICE),
        ("CALLS", 2),
        ("BARS", {(1024, 6): 4.0, (528, 5): 1e6}),
        ("BATCHES", ((1024, 3, 0), (656, 2, 4))),
        ("PLANS", plans),
        ("BATCH_PLANS", [CopyPlan(), CopyPlan(total=2, early=True, vectors=True)]),
        ("HOST_ROWS", 640),
        ("LISTED", 9),
        ("graph_us", graph_us),
        ("RESOLVED", ((2, 9, 2, 0.9),)),
        ("RESOLVES", [ResolvePlan(), ResolvePlan(once=True)]),
        ("STEPPED", ((2, 9, 2, 0.9),)),
        ("STEPS", [(ResolvePlan(), CopyPlan()), (ResolvePlan(once=True), CopyPlan(early=True, vectors=True))]),
    ):
        monkeypatch.setattr(bench, name, value)
    bench.main([str(out)])
    found = json.loads(out.read_text())
    assert [copy["met"] for copy in found["copies"]] == [True, True]
    assert [len(found[kind]) for kind in bench.KINDS] == [2, 2, 1, 1]
    assert all(row["right"] for kind in bench.KINDS for shape in found[kind] for row in shape["tried"])
    copied = {row["plan"]: row for row in found["copies"][0]["tried"]}
    of_many, of_more = copied[str(plans[0])], copied[str(plans[2])]
    assert of_many["programs"] == of_more["programs"] == 6
    assert of_many["us"] == of_more["us"] < copied[str(plans[1])]["us"], "equal launches have one time"
    assert found["nearest to the bars, 1024 B"]["plan"] == str(plans[0])
    shown = capsys.readouterr().out
    assert "of the bar" in shown
    assert "2 of 2 bars of copies met" in shown
    with pytest.raises(SystemExit, match=r"--only 'copy' names other kinds than copies, batches"):
        bench.main(["--only", "copy"])
