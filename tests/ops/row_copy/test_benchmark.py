"""The benchmark of row copies and residency, with everything small and a clock that stands still."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.kernels import bench_residency as bench
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
    plans = [CopyPlan(), CopyPlan(rows=2, programs=2, early=True, vectors=True)]
    for name, value in (
        ("DEVICE", DEVICE),
        ("CALLS", 2),
        ("BARS", {(1024, 6): 4.0, (528, 5): 1e6}),
        ("BATCHES", ((3, 0), (2, 4))),
        ("PLANS", plans),
        ("TOTALS", (2, 1 << 20)),
        ("HOST_ROWS", 50),
        ("LISTED", 9),
        ("graph_us", graph_us),
        ("bench_resolve", lambda *shape: {"shape": shape}),
    ):
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(sys, "argv", ["bench_residency.py", str(out)])
    bench.main()
    found = json.loads(out.read_text())
    assert [copy["met"] for copy in found["copies"]] == [True, True]
    assert len(found["batches"]) == 4 - 2
    assert all(row["right"] for kind in ("copies", "batches") for copy in found[kind] for row in copy["tried"])
    assert {row["pages"] for row in found["copies"][0]["tried"]} == set(bench.PAGES)
    assert found["nearest to all bars"]["plan"] == str(plans[0])
    shown = capsys.readouterr().out
    assert "of the bar" in shown
    assert "2 of 2 met" in shown
