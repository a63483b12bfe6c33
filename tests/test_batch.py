"""The runner of plans: limits that hold, results that survive, plans that are refused before anything runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import batch
from benchmarks.batch import Outcome, PlanError

PLANS = sorted((Path(__file__).parents[1] / "benchmarks" / "plans").glob("*.json"))


def job(name: str, code: str, **others: Any) -> dict[str, Any]:
    return {"name": name, "command": ["{python}", "-c", code, "{out}"], "limit": 60, "estimate": 0.01, **others}


def plan(folder: Path, *jobs: dict[str, Any], name: str = "plan.json") -> Path:
    path = folder / name
    path.write_text(json.dumps({"jobs": jobs}))
    return path


def run(folder: Path, *jobs: dict[str, Any], more: tuple[str, ...] = ()) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and the summary by name."""
    code = batch.main([str(plan(folder, *jobs)), "--out", str(folder / "out"), *more])
    return code, {entry["name"]: entry for entry in json.loads((folder / "out" / "summary.json").read_text())}


def packed(folder: Path) -> dict[str, str]:
    """Name -> text of what is in the archive."""
    found = {}
    with tarfile.open(folder / "out.tar.gz") as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            found[member.name] = file.read().decode()
    return found


WRITES = "import sys; open(sys.argv[1] + '/r.json', 'w').write('[1]'); print('said')"
HANGS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
open(sys.argv[1] + "/part.json", "w").write(str(child.pid))
time.sleep(99)
"""


def test_a_hanging_job_is_ended_with_its_children_and_its_results_survive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "GRACE", 0.2)
    hangs = job("hangs", HANGS, limit=2, results=["part.json", "whole.json"])
    code, found = run(tmp_path, hangs, job("next", WRITES, results=["r.json"]))
    assert code == 1
    assert (found["hangs"]["state"], found["next"]["state"]) == ("ended", "done")
    assert found["hangs"]["missing"] == ["whole.json"]
    files = packed(tmp_path)
    assert files["out/next/r.json"] == "[1]"
    assert files["out/next.log"].endswith("said\n")
    child = int(files["out/hangs/part.json"])
    assert not _runs(child), "the child of a job outlived it"


def _runs(process: int) -> bool:
    """Whether a process is there, other than as one that nobody has reaped."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_children_that_a_job_left_behind_end_with_it(tmp_path: Path) -> None:
    leaves = "import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']); "
    leaves += "open(sys.argv[1] + '/pid', 'w').write(str(c.pid))"
    code, found = run(tmp_path, job("leaves", leaves, results=["pid"]))
    assert (code, found["leaves"]["state"]) == (0, "done")
    assert not _runs(int((tmp_path / "out" / "leaves" / "pid").read_text()))


def test_a_failure_is_shown_at_once_and_the_others_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fails = job("fails", "import sys; print('before'); sys.exit('no such device')")
    code, found = run(tmp_path, fails, job("fine", WRITES), job("gone", "", command=["/no/such/program"]))
    assert code == 1
    assert [found[name]["state"] for name in ("fails", "fine", "gone")] == ["failed", "done", "failed"]
    said = capsys.readouterr().out
    assert said.index("no such device") < said.index("fine")
    assert "exit code 1" in said
    assert "/no/such/program" in found["gone"]["detail"]


def test_everything_so_far_is_packed_before_the_next_job_runs(tmp_path: Path) -> None:
    looks = "import sys, tarfile; print(tarfile.open(sys.argv[1] + '/../../out.tar.gz').getnames())"
    code, _ = run(tmp_path, job("first", WRITES), job("second", looks))
    assert code == 0
    assert "out/first/r.json" in (tmp_path / "out" / "second.log").read_text()


def test_what_does_not_fit_is_passed_over_and_limits_end_with_the_whole(tmp_path: Path) -> None:
    sleeps = job("sleeps", "import time; time.sleep(99)", estimate=0.5)
    long, short = job("long", WRITES, estimate=500), job("short", WRITES, estimate=0.2)
    began = time.monotonic()
    code, found = run(tmp_path, long, short, sleeps, more=("--seconds", "3"))
    assert time.monotonic() - began < 30
    assert code == 1
    assert [found[name]["state"] for name in ("long", "short", "sleeps")] == ["no time", "done", "ended"]


def test_the_same_command_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    more = ("--state", str(tmp_path / "state"))
    counts = "import sys; open(sys.argv[1] + '/n', 'a').write('x'); sys.exit(len(open(sys.argv[1] + '/n').read()) < 2)"
    code, found = run(tmp_path, job("fine", WRITES), job("once", counts), more=more)
    assert (code, found["fine"]["state"], found["once"]["state"]) == (1, "done", "failed")
    code, found = run(tmp_path, job("fine", WRITES), job("once", counts), more=more)
    assert (code, found["fine"]["state"], found["once"]["state"]) == (0, "done before", "done")


def test_what_stays_on_a_machine_is_made_again_on_the_next(tmp_path: Path) -> None:
    more = ("--state", str(tmp_path / "state"))
    for _ in range(2):
        _, found = run(tmp_path, job("cache", WRITES, again=True), job("result", WRITES), more=more)
    assert (found["cache"]["state"], found["result"]["state"]) == ("done", "done before")


def test_a_program_that_is_not_there_is_reported_and_no_failure(tmp_path: Path) -> None:
    given = job("given", "import sys; print(sys.argv[2])", needs=["sh"])
    given["command"].append("{sh}")
    code, found = run(tmp_path, job("without", "", needs=["no-such-program"]), given)
    assert code == 0
    assert (found["without"]["state"], found["without"]["detail"]) == ("absent", "there is no no-such-program")
    assert (tmp_path / "out" / "given.log").read_text().rstrip().endswith("/sh")


def test_programs_are_found_where_their_makers_put_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "2025.3.1"
    folder.mkdir()
    program = folder / "ncu"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(batch, "PROGRAM_FOLDERS", (f"{tmp_path}/*",))
    assert batch.find_program("ncu") == str(program)


def test_large_files_are_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = (
        "import sys; open(sys.argv[1] + '/large', 'w').write('x' * 5000); open(sys.argv[1] + '/small', 'w').write('y')"
    )
    run(tmp_path, job("writes", large), more=("--largest", "4000"))
    assert "out/writes/small" in packed(tmp_path)
    assert "out/writes/large" not in packed(tmp_path)
    assert "writes/large" in capsys.readouterr().out


def test_the_archive_may_lie_elsewhere(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(tmp_path, job("a", WRITES), more=("--archive", str(elsewhere / "all.tar.gz")))
    assert [path.name for path in elsewhere.iterdir()] == ["all.tar.gz"]
    assert not (tmp_path / "out.tar.gz").exists()
    for option in ("--archive", "--state"):
        with pytest.raises(SystemExit):
            run(tmp_path, job("a", WRITES), more=(option, str(tmp_path / "none" / "file")))


def test_jobs_share_one_triton_cache_and_take_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(batch.CACHE, "of the user")
    tells = f"import os; print(os.environ['{batch.CACHE}'], os.environ['MINE'])"
    run(tmp_path, job("a", tells, env={"MINE": "1"}), more=("--cache", str(tmp_path / "cache")))
    assert (tmp_path / "out" / "a.log").read_text().endswith(f"{tmp_path / 'cache'} 1\n")


WAITS = """
import os, sys, time
open(sys.argv[1] + "/here", "w").write("1")
other = os.path.join(os.path.dirname(sys.argv[1]), "{other}", "here")
while not os.path.exists(other):  # to the job's limit
    time.sleep(0.01)
"""


def test_jobs_may_run_side_by_side(tmp_path: Path) -> None:
    """Each waits for the other."""
    jobs = [job(name, WAITS.replace("{other}", other)) for name, other in (("a", "b"), ("b", "a"))]
    code, found = run(tmp_path, *jobs, more=("--together",))
    assert code == 0
    assert {name: entry["state"] for name, entry in found.items()} == {"a": "done", "b": "done"}


@pytest.mark.parametrize("more", [(), ("--together",)])
def test_a_batch_that_is_told_to_end_ends_its_job(tmp_path: Path, more: tuple[str, ...]) -> None:
    sleeps = "import os, sys, time; open(sys.argv[1] + '/pid', 'w').write(str(os.getpid())); time.sleep(99)"
    path = plan(tmp_path, job("sleeps", sleeps))
    root = Path(batch.__file__).parents[1]
    command = [sys.executable, str(batch.__file__), str(path), "--out", str(tmp_path / "out"), *more]
    process = subprocess.Popen(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    written = tmp_path / "out" / "sleeps" / "pid"
    until = time.monotonic() + 60
    while not (written.is_file() and written.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not _runs(int(written.read_text()))


def test_jobs_are_chosen_by_parts_of_their_names(tmp_path: Path) -> None:
    jobs = batch.read_plan(plan(tmp_path, *[job(name, "") for name in ("decode-a", "decode-b", "kernels")]))
    assert [j.name for j in batch.choose(jobs, only="decode", skip="-b")] == ["decode-a"]
    assert [j.name for j in batch.choose(jobs, only="", skip="")] == ["decode-a", "decode-b", "kernels"]
    with pytest.raises(PlanError, match="no job's name has 'decoed'; there are decode-a, decode-b, kernels"):
        batch.choose(jobs, only="decoed", skip="")


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"name": "a b"}, "a job's name has letters"),
        ({"limits": 3}, "limits: missing or unknown"),
        ({"limit": 0}, "limit is a positive number of seconds, got 0"),
        ({"estimate": True}, "estimate is a positive number of seconds, got True"),
        ({"command": []}, "command is empty"),
        ({"command": "python x"}, "command is a list of strings, got 'python x'"),
        ({"env": {"A": 1}}, "env maps names to strings"),
        ({"again": 1}, "again is true or false, got 1"),
    ],
)
def test_a_wrong_plan_is_refused_by_name_before_anything_runs(
    entry: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan(tmp_path, job("fine", WRITES), {**job("a", ""), **entry})
    with pytest.raises(SystemExit) as ended:
        batch.main([str(path), "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_two_jobs_of_one_name_are_refused(tmp_path: Path) -> None:
    paths = [plan(tmp_path, job("a", ""), name=name) for name in ("x.json", "y.json")]
    with pytest.raises(PlanError, match="more than one job is named a"):
        batch.read_plans(paths)


def test_a_line_says_what_is_wrong() -> None:
    assert Outcome("a", "done", 1.0, missing=("r.json",)).failed
    assert "not written: r.json" in Outcome("a", "done", 1.0, missing=("r.json",)).line()
    assert not Outcome("a", "absent").failed


def test_the_plans_here_name_scripts_that_are_there() -> None:
    """And results that their commands are told to write."""
    root = Path(batch.__file__).parents[1]
    assert PLANS
    for each in batch.read_plans(PLANS):
        for part in each.command:
            if part.endswith(".py"):
                assert (root / part).is_file(), f"{each.name}: {part}"
        told = " ".join(each.command)
        assert all(f"{{out}}/{result}" in told for result in each.results), each.name
        assert each.estimate <= each.limit <= 540, f"{each.name}: a command has ten minutes"
        for name in each.needs:
            assert f"{{{name}}}" in told, each.name
