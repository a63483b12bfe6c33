"""The benchmark under pressure, small and on a CPU: every case of a slice, its file, its trace and the drawing."""

from __future__ import annotations

import json
import re
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import chosen_experts, step_trace
from benchmarks.chosen_experts import ChosenExperts, different, mlp
from benchmarks.hisparse_gpu import CASES, chosen, compared, main, parsed
from benchmarks.replayed_selections import REAL, ReplayedSelections, indexer
from scripts.trace_timeline import COLORS, drawing
from scripts.trace_timeline import main as draw

SMALL = ["--device", "cpu", "--config", "tiny", "--context", "512", "--steps", "4", "--warm", "3"]


def kernel(name: str, ts: float, dur: float, tid: int = 7) -> dict[str, Any]:
    return {"name": name, "ph": "X", "ts": ts, "dur": dur, "cat": "kernel", "pid": 0, "tid": tid}


def test_every_case_of_a_slice_is_measured_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    asked = [f"A:{case}" for case in ("resident", "capped", "90", "chance", "free")] + ["B:resident"]
    rows = main([*SMALL, *(part for case in asked for part in ("--case", case)), "--json", str(out)])
    kept = json.loads(out.read_text())
    assert kept["cases"] == json.loads(json.dumps(rows))
    by_case = {row["case"]: row for row in rows}
    assert [*by_case] == asked
    assert not any("wrong" in row for row in rows)
    assert by_case["A:capped"]["batch"] == 1
    replayed, chance, free = by_case["A:90"], by_case["A:chance"], by_case["A:free"]
    assert 0.8 < replayed["hit_rate"] < 0.97
    assert chance["hit_rate"] < replayed["hit_rate"]
    assert free["selected_rows_a_step"] == free["spilled_blocks"] == 0
    assert replayed["spilled_blocks"] > 10
    assert {"of_resident", "over_capped", "bound_over_capped", "hidden", "met"} <= replayed.keys()
    trace = json.loads((tmp_path / replayed["trace"]).read_text())
    assert "<rect" in drawing(trace["traceEvents"], trace["otherData"])
    assert (indexer.select_topk_decode, indexer.select_topk) == REAL
    assert mlp.route is chosen_experts.REAL
    even = 8 * (1 - (1 - 4 / 8) ** 4)  # experts that four sequences choose, each four of eight
    for row in rows:
        wanted = 4.0 if row["case"] == "A:capped" else even
        assert statistics.mean(row["experts"]) == pytest.approx(wanted, rel=0.05), row["case"]
        assert set(row["experts_of_a_quarter"]) == {4.0}
        assert len(row["experts"]) == (5 if row["case"] == "B:resident" else 7)
        assert "apart" not in row


def test_cases_come_in_order_of_importance_and_wrong_ones_are_named() -> None:
    assert dict(chosen(parsed(SMALL))) == {letter: list(CASES) for letter in "ABC"}
    assert list(chosen(parsed(["--case", "C:90", "--case", "A:free", "--case", "A:90"]))) == [
        ("A", ["90", "free"]),
        ("C", ["90"]),
    ]
    with pytest.raises(SystemExit, match=r"--case 'D:90' is none of A, B, C with one of resident, capped"):
        list(chosen(parsed(["--case", "D:90"])))
    with pytest.raises(SystemExit, match=r"--batch is 6; a quarter"):
        parsed(["--batch", "6"])


def test_what_was_cut_off_spoils_no_comparison() -> None:
    rows: list[dict[str, Any]] = [
        {"case": "A:90", "ms": 5.0, "tokens_per_s": 800.0, "batch": 4, "bus_ms": 1.0, "floor_ms": 2.0},
        {"case": "A:start", "wrong": "RuntimeError"},
        {"case": "B:resident", "ms": 4.0, "tokens_per_s": 1000.0, "batch": 4, "floor_ms": 2.0},
        {"case": "B:capped", "ms": 2.0, "tokens_per_s": 500.0, "batch": 1, "floor_ms": 1.0},
        {"case": "B:90", "ms": 5.0, "tokens_per_s": 800.0, "batch": 4, "bus_ms": 4.0, "floor_ms": 2.0},
    ]
    for row in rows:
        row |= {"experts": [60.0, 64.0], "experts_of_a_quarter": [40.0, 44.0]}
    found = {row["case"]: row for row in compared(rows)}
    assert "of_resident" not in found["A:90"]
    assert found["B:90"]["of_resident"] == 0.8
    assert found["B:90"]["met"] is False
    assert found["B:90"]["over_capped"] == 1.6
    assert found["B:90"]["bound_over_capped"] == 1.0  # the bus takes 4 ms for 4 tokens, the capped engine 1 ms for one


def test_cases_that_read_other_experts_are_not_compared() -> None:
    kept = {"tokens_per_s": 800.0, "batch": 4, "bus_ms": 1.0, "floor_ms": 2.0, "experts_of_a_quarter": [40.0, 41.0]}
    resident = kept | {"case": "B:resident", "ms": 4.0, "experts": [60.0, 62.0]}
    capped = kept | {"case": "B:capped", "ms": 2.0, "experts": [40.0, 41.0]}
    alike = kept | {"case": "B:90", "ms": 5.0, "experts": [58.0, 59.0]}
    fewer = kept | {"case": "B:80", "ms": 5.0, "experts": [57.0, 56.0], "apart": ["B:80 still"]}
    narrow = kept | {"case": "B:95", "ms": 5.0, "experts": [60.0, 62.0], "experts_of_a_quarter": [30.0, 41.0]}
    rows = {row["case"]: row for row in compared([resident, capped, alike, fewer, narrow])}
    assert {"of_resident", "over_capped"} <= rows["B:90"].keys()
    assert "apart" not in rows["B:90"]
    assert "of_resident" not in rows["B:80"]
    assert "over_capped" in rows["B:80"]
    assert rows["B:80"]["apart"] == [
        "B:80 still",
        "B:80 experts [57.0, 56.0], B:resident experts [60.0, 62.0]: over 5% apart",
    ]
    assert "over_capped" not in rows["B:95"]
    assert "of_resident" in rows["B:95"]


def test_experts_of_a_step_are_those_that_its_tokens_chose() -> None:
    experts = ChosenExperts(rows=3)
    try:
        routers = [torch.randn(8, 4) for _ in range(3)]
        named = {"top_k": 2, "num_groups": 1, "topk_groups": 1, "norm_topk_prob": True, "scale": 1.0, "live": None}
        x = torch.randn(4, 4)

        def step(rows: int, layers: int) -> list[torch.Tensor]:
            return [mlp.route(x[:rows], router, torch.zeros(8), **named)[1] for router in routers[:layers]]

        step(2, 3)  # a start with other weights leaves its routers behind
        found = experts.of_step(lambda: step(2, 2))
        assert [ids.tolist() for ids in found] == [[*ids.tolist(), [-1, -1]] for ids in step(2, 2)]
        assert experts.of_step(lambda: step(4, 2)) == []  # larger than any that is looked at
    finally:
        experts.close()
    assert different(torch.tensor([[3, 1], [1, 0], [-1, -1]])) == 3


@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.9, 1.0])
def test_selections_overlap_as_asked(overlap: float) -> None:
    replayed = ReplayedSelections(4000, kpool=4, device="cpu")
    try:
        out = torch.full((3, 403), -1, dtype=torch.int32)
        out[:2, 0] = 0  # the third row is padding
        replayed._replace(out)
        replayed.use(overlap)
        seen: list[set[int]] = []
        for _ in range(5):
            step = out.clone()
            out.copy_(step)
            replayed._replace(out)
            row = out[0, :400].tolist()
            assert row == sorted(set(row))
            assert 0 <= row[0] <= row[-1] < 4000
            assert out[0, 400:].tolist() == [-1] * 3
            assert out[2].tolist() == [-1] * 403
            assert all({p // 4 * 4 + i for i in range(4)} <= set(row) for p in row)
            seen.append(set(row))
        for before, now in pairwise(seen):
            assert len(before & now) / 400 == pytest.approx(overlap, abs=0.02)
    finally:
        replayed.close()


def test_a_step_is_cut_out_and_its_copies_measured() -> None:
    """Three steps of two kernels and a copy that runs beside the first for half of its time; one step that was cut."""
    events = []
    for start in (0.0, 10_000.0, 20_000.0):
        events += [
            kernel("_moe", start, 100),
            kernel("_attend", start + 200, 50),
            kernel("_resolve_kernel", start, 5, 9),
        ]
        events += [kernel("_copy_rows_kernel", start + 50, 100, 9)]
    events += [kernel("_moe", 30_000, 100)]
    steps = step_trace.steps_of(events)
    assert [len(step) for step in steps] == [4, 4, 4]
    step = step_trace.from_zero(steps[1])
    assert step_trace.copies(step) == {"copy_ms": 0.1, "copy_beside_compute": 0.5, "step_us": 250.0}
    picture = drawing(step, {"case": "A:90"})
    assert picture.count("<rect") == 1 + 2 * 4  # the whole step, and around its copy
    assert "rows from the host" in picture
    assert "50% of it beside compute" in picture
    assert "blocks that move" not in picture
    moving = [*step, *(kernel("Memcpy DtoH (Device -> Pinned)", ts, 9, tid) for ts, tid in ((190, 7), (90, 8)))]
    assert drawing(moving, {}).count(COLORS["blocks that move"]) == 2  # not the one that brings tokens
    early = [kernel("_attend", 0, 100), kernel("merge", 2, 110)]
    assert re.findall(r'width="([0-9.]+)" height="26"', drawing(early, {})) == ["826.79", "99.21"]
    with pytest.raises(SystemExit, match="nothing to draw"):
        drawing([], {})


def test_copies_launched_early_count_once() -> None:
    """The second waits for the first for 60 us; attention runs beside both for 50."""
    step = [kernel("_resolve_once_kernel", 0, 10, 9), kernel("_copy_rows_kernel", 10, 100, 9)]
    step += [kernel("_copy_rows_kernel", 50, 150, 9), kernel("attend", 80, 50), kernel("merge", 100, 30)]
    assert step_trace.copies(step)["copy_ms"] == pytest.approx(0.19)
    assert step_trace.copies(step)["copy_beside_compute"] == pytest.approx(50 / 190)


def test_lanes_by_stream_and_a_window(tmp_path: Path) -> None:
    """A conversion on the side stream, drawn with its name behind it as far as the lane is free."""
    step = [kernel("_select_kernel", 0, 100), kernel("nvjet_a", 110, 200), kernel("attend_roles", 400, 600)]
    step += [kernel("_map_kernel", 120, 5, 9), kernel("_map_kernel", 130, 5, 9), kernel("_map_kernel", 620, 5, 9)]
    trace, out = tmp_path / "a.trace.json", tmp_path / "a.svg"
    step_trace.write(trace, step, {"policy": "external"})
    draw([str(trace), str(out), "--lanes", "streams", "--window", "0.1", "0.6"])
    picture = out.read_text()
    assert picture.count(f'fill="{COLORS["side stream"]}"') == 3 + 2
    assert picture.count(f'fill="{COLORS["compute stream"]}"') == 3 + 2
    assert "0.1 to 0.6 ms:" in picture
    assert "beside compute" not in picture
    names = re.findall(r'<text x="([0-9.]+)" y="[0-9]+">conversion<', picture)
    scale = 1100 - 150 - 24
    expected = [150 + 135 * scale / 1000 + 4, 150 + 625 * scale / 1000 + 4, 150 + 35 * scale / 500 + 4]
    assert [float(x) for x in names] == pytest.approx(expected, abs=0.01)
    with pytest.raises(SystemExit, match=r"--window is 0.5 to 2 ms, and the step 0 to 1"):
        draw([str(trace), str(out), "--window", "0.5", "2"])
    with pytest.raises(SystemExit, match=r"--window is 0.5 to 0.5 ms"):
        draw([str(trace), str(out), "--window", "0.5", "0.5"])
