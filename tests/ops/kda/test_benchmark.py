"""The benchmark of KDA's decode steps: what it compiles ahead, what it times first, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels import bench_kda as bench
from sidestream.ops.kda.triton_decode import Launch, usual_launch
from tests.ops.triton_mode import DEVICE

ROOT = Path(__file__).parents[3]
PLAN = ROOT / "benchmarks" / "plans" / "kernels.json"
LATER = float("inf")


class Pool:
    """Stands for a pool of processes, in this one."""

    def __init__(self, *_args: Any, **_options: Any) -> None: ...

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_raised: object) -> None: ...

    def map(self, run: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        return map(run, tasks)


def fake_times(launch: Launch, rows: int) -> dict[str, Any]:
    return {"launch": str(launch), "us": 2.0, "in_layer_us": 2.0, "parts_us": {"projections": 1.0}}


@pytest.fixture(scope="module")
def launched() -> Any:
    """What ``compiled_benchmark`` prints."""
    script = Path(__file__).with_name("compiled_benchmark.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def test_nothing_is_compiled_while_it_is_timed(launched: Any) -> None:
    """Kernels that ``time_step`` launches are those that the processes compiled."""
    compiled, timed = (set(map(tuple, kernels)) for kernels in launched[:2])
    assert timed
    assert compiled == timed


def test_three_programs_find_a_place_on_a_multiprocessor(launched: Any) -> None:
    """Of the ordered kernel as it is in use beyond 16 rows; nothing is spilled."""
    found = launched[2]
    assert (found["resident"], found["stack"], found["code"]["spilled"]) == (3, 0, [0, 0]), found


def test_one_launch_keeps_all_in_registers(launched: Any) -> None:
    """Of 8 warps, and waits at five barriers, one of them before the kernel in front has ended."""
    found = launched[3]
    assert (found["warps"], found["stack"], found["code"]["spilled"]) == (8, 0, [0, 0]), found
    assert found["code"]["counts"]["barrier"] == [5, 0], found


def test_all_that_is_in_use_is_timed() -> None:
    """Each kind once: products early or not, of 16 rows or 64, a kernel that releases the next one, the plain one."""
    steps = bench.steps_of(bench.BATCHES)
    assert len(set(steps)) == len(steps)
    assert set(steps) == set(map(usual_launch, range(1, 257)))


@pytest.mark.parametrize("rings", [False, True])
def test_what_a_step_must_move(monkeypatch: pytest.MonkeyPatch, rings: bool) -> None:
    """Each value of the states, and the least of each channel's ring in its first row; nothing of scratch."""
    monkeypatch.setattr(bench, "HEADS", 2)
    state, ring = torch.randn(4, 1, 2, 128, 128, device=DEVICE), torch.randn(4 * 3, 3 * 2 * 128, device=DEVICE)
    made = {"state": state.clone(), "conv_state": ring.bfloat16()}
    bench.scale_states(made, rings=rings)
    assert torch.equal(made["state"][0], state[0])
    assert torch.equal(made["state"][1:], state[1:] * 0.999)
    want = ring.bfloat16().view(4, 3, -1)
    if rings:
        want[1:, 0] = want[1:].amin(1)
    assert torch.equal(made["conv_state"].view(4, 3, -1), want)


@pytest.mark.parametrize(("left", "missed"), [(9, []), (2, ["batch 4"]), (0, ["batch 64", "batch 1", "batch 4"])])
def test_batches_are_begun_while_there_is_time(monkeypatch: pytest.MonkeyPatch, left: int, missed: list[str]) -> None:
    """Each takes a second here; what is wrong takes none."""
    now = [0]

    def time_step(launch: Launch, rows: int) -> dict[str, Any]:
        now[0] += 1
        return fake_times(launch, rows)

    monkeypatch.setattr(bench, "time_step", time_step)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    results: dict[str, Any] = {"shapes": {}}
    assert bench.time_decodes(bench.steps_of([64, 1]), [64, 1, 4], results, left - 0.5, None) == missed
    want = {rows: str(usual_launch(rows)) for rows in (64, 1) if f"batch {rows}" not in missed}
    assert {rows: found["launch"] for rows, found in results["shapes"].items()} == want


@pytest.mark.parametrize(("seconds", "error", "many", "says"), [
    (LATER, 0.0, 0.0, None),
    (-1.0, 0.0, 0.0, "out of time: batch 2"),
    (LATER, float("nan"), 0.0, "WRONG Launch"),
    (LATER, 0.0, 1.0, "WRONG 150 rows"),
])  # fmt: skip
def test_a_run_that_misses_a_launch_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: float, error: float, many: float, says: str | None
) -> None:
    """And keeps what it found all the same."""
    out, bad = tmp_path / "kda.json", usual_launch(2)
    monkeypatch.setattr(bench, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(bench, "BUDGET_S", seconds)
    monkeypatch.setattr(bench, "time_step", fake_times)
    monkeypatch.setattr(bench, "first_run", lambda task: (error if task == bad else 0.0, ""))
    monkeypatch.setattr(bench, "check_many", lambda steps, _: {str(x): many if x == bad else 0.0 for x in steps})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(sys, "argv", ["bench_kda.py", str(out), "--only", "decodes", "--rows", "64", "2"])
    if says is None:
        bench.main()
    else:
        with pytest.raises(SystemExit) as ended:
            bench.main()
        assert says in str(ended.value.code)
    kept = json.loads(out.read_text())["shapes"]
    assert list(kept) == [rows for rows in ("64", "2") if says is None or (rows == "64" and seconds > 0)]


def test_time_runs_from_when_all_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that took."""
    now = [100.0]

    def first_run(_task: object) -> tuple[float, str]:
        now[0] += 1000.0
        return 0.0, ""

    ends: list[float] = []
    monkeypatch.setattr(bench, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(bench, "first_run", first_run)
    monkeypatch.setattr(bench, "check_many", lambda steps, _: dict.fromkeys(map(str, steps), 0.0))
    monkeypatch.setattr(bench, "time_decodes", lambda right, batches, results, until, path: ends.append(until) or [])
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(sys, "argv", ["bench_kda.py", "--only", "decodes", "--rows", "4"])
    bench.main()
    assert ends == [now[0] + bench.BUDGET_S]


def test_the_plan_times_decode_steps_alone() -> None:
    job = next(job for job in json.loads(PLAN.read_text())["jobs"] if job["name"] == "kernel-kda")
    assert job["command"][-2:] == ["--only", "decodes"]
    assert bench.BUDGET_S < job["estimate"] < job["limit"]
