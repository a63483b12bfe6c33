"""Runs a plan of jobs one after the other, each with a limit of its own, and loses nothing that a job has written.

    PYTHONPATH=. python benchmarks/batch.py benchmarks/plans/whole-engine.json --out OUT --seconds 560 --state STATE

A plan is JSON: ``{"jobs": [...]}``, most important first. A job:

- ``name``: letters, digits, ``-`` and ``_``; its output goes to ``OUT/NAME.log``;
- ``command``: a list, in which ``{python}`` is this interpreter and ``{out}`` the folder ``OUT/NAME``;
- ``limit``: seconds after which it is ended with all its children;
- ``estimate``: seconds it is expected to take; a job for which less is left of ``--seconds`` is passed over;
- ``results``: files in ``{out}`` that it should write; one that is missing is named;
- ``needs``: programs without which there is nothing to run; reported, and no failure;
- ``env``: variables to set;
- ``again``: true for a job that runs in every batch, since what it makes stays on the machine and not in ``OUT``.

All jobs share one Triton cache. After each job its line is printed, and everything in ``OUT`` is packed anew into
``OUT.tar.gz`` (or ``--archive``), files larger than ``--largest`` left out. Jobs that succeeded are noted in
``--state``, so that the same command goes on where the last one was cut off.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GRACE = 5.0
"""Seconds that a job may take to end by itself once its limit is reached."""
TAIL_LINES = 12
PROGRAM_FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/nsight-compute/*")
"""Where programs lie that are often not on the path."""
CACHE = "TRITON_CACHE_DIR"
_RUNNING: set[subprocess.Popen[bytes]] = set()
"""First processes of the jobs that run."""


class PlanError(ValueError):
    """A plan is wrong; names the file, the job and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One entry of a plan; see the module's docstring."""

    name: str
    command: tuple[str, ...]
    limit: float
    estimate: float
    results: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    again: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job.

    Attributes:
        state: "done", "failed" (its exit code says so), "ended" (at its limit), "absent" (a program it needs is not
            there), "no time" or "done before".
        seconds: it took.
        detail: why it is not "done".
        missing: results that it did not write.
    """

    name: str
    state: str
    seconds: float = 0.0
    detail: str = ""
    missing: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return self.state in ("failed", "ended") or bool(self.missing)

    def line(self) -> str:
        missing = f"; not written: {', '.join(self.missing)}" if self.missing else ""
        return f"{self.name:28} {self.state:12} {self.seconds:7.1f} s  {self.detail}{missing}".rstrip()


def read_plan(path: Path) -> list[Job]:
    """Raises: PlanError."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: {error}") from None
    if not isinstance(found, dict) or set(found) != {"jobs"} or not isinstance(found["jobs"], list):
        raise PlanError(f'{path}: a plan is {{"jobs": [...]}}')
    return [_job(path, entry) for entry in found["jobs"]]


def _job(path: Path, entry: Any) -> Job:
    if not isinstance(entry, dict):
        raise PlanError(f"{path}: a job is an object, got {entry!r}")
    name = entry.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise PlanError(f"{path}: a job's name has letters, digits, '-' and '_', got {name!r}")
    required, lists = {"name", "command", "limit", "estimate"}, ("command", "results", "needs")
    known = {*required, *lists, "env", "again"}
    if wrong := (required - set(entry)) | (set(entry) - known):
        raise PlanError(
            f"{path}: job {name}: {', '.join(sorted(wrong))}: missing or unknown; known are {sorted(known)}"
        )
    for key in lists:
        values = entry.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise PlanError(f"{path}: job {name}: {key} is a list of strings, got {values!r}")
    for key in ("limit", "estimate"):
        if not isinstance(entry[key], int | float) or isinstance(entry[key], bool) or entry[key] <= 0:
            raise PlanError(f"{path}: job {name}: {key} is a positive number of seconds, got {entry[key]!r}")
    if not entry["command"]:
        raise PlanError(f"{path}: job {name}: command is empty")
    env = entry.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise PlanError(f"{path}: job {name}: env maps names to strings, got {env!r}")
    if not isinstance(entry.get("again", False), bool):
        raise PlanError(f"{path}: job {name}: again is true or false, got {entry['again']!r}")
    return Job(**{**entry, **{key: tuple(entry.get(key, [])) for key in lists}, "env": env})


def read_plans(paths: Sequence[Path]) -> list[Job]:
    """Raises: PlanError, also for a name that two jobs have."""
    jobs = [job for path in paths for job in read_plan(path)]
    names = [job.name for job in jobs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PlanError(f"more than one job is named {', '.join(twice)}")
    return jobs


def choose(jobs: Sequence[Job], *, only: str, skip: str) -> list[Job]:
    """Jobs whose name has one of the parts of ``only`` (all if it is empty) and none of ``skip``.

    Raises:
        PlanError: a part is in no name.
    """
    wanted, unwanted = ([part for part in parts.split(",") if part] for parts in (only, skip))
    for part in (*wanted, *unwanted):
        if not any(part in job.name for job in jobs):
            raise PlanError(f"no job's name has {part!r}; there are {', '.join(job.name for job in jobs)}")
    return [
        job
        for job in jobs
        if (not wanted or any(part in job.name for part in wanted)) and not any(part in job.name for part in unwanted)
    ]


def find_program(name: str) -> str | None:
    """Where a program lies: on the path, or where its makers put it."""
    folders = [found for pattern in PROGRAM_FOLDERS for found in sorted(glob.glob(pattern))]
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *folders]))


def run_job(job: Job, out: Path, *, limit: float) -> Outcome:
    """Run it with its output in ``out/NAME.log``; end it and its children at ``limit`` seconds."""
    programs = {name: find_program(name) for name in job.needs}
    if absent := [name for name, path in programs.items() if path is None]:
        return Outcome(job.name, "absent", detail=f"there is no {', '.join(absent)}")
    folder = out / job.name
    folder.mkdir(parents=True, exist_ok=True)
    named = {
        "{python}": sys.executable,
        "{out}": str(folder),
        **{f"{{{name}}}": str(p) for name, p in programs.items()},
    }
    command = [_fill(part, named) for part in job.command]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", **job.env}
    started = time.monotonic()
    log = out / f"{job.name}.log"
    with log.open("wb") as written:
        written.write(f"$ {' '.join(command)}\n".encode())
        written.flush()
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                process_group=0,  # and no session of its own, so that it ends with this one if that is killed
            )
        except OSError as error:
            return Outcome(job.name, "failed", detail=str(error))
        _RUNNING.add(process)
        try:
            code = process.wait(limit)
            state, detail = ("done", "") if code == 0 else ("failed", f"exit code {code}")
        except subprocess.TimeoutExpired:
            state, detail = "ended", f"at its limit of {limit:.0f} s"
        finally:
            _end(process)
            _RUNNING.discard(process)
    seconds = time.monotonic() - started
    missing = tuple(name for name in job.results if not (folder / name).is_file() or not (folder / name).stat().st_size)
    return Outcome(job.name, state, round(seconds, 1), detail, missing)


@contextmanager
def _ended_if_this_ends() -> Iterator[None]:
    """No job outlives what waits for it."""
    try:
        yield
    except BaseException:
        for process in list(_RUNNING):
            _end(process)
        raise


def _fill(part: str, named: dict[str, str]) -> str:
    for key, value in named.items():
        part = part.replace(key, value)
    return part


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a job's process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        until = time.monotonic() + GRACE
        while number == signal.SIGTERM and time.monotonic() < until and _alive(process):
            time.sleep(0.02)
    process.wait()


def _alive(process: subprocess.Popen[bytes]) -> bool:
    """Whether some process of the group lives; reaps its leader."""
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def pack(out: Path, archive: Path, *, largest: int) -> list[str]:
    """Everything in ``out`` as one archive, replaced in one go; names of files over ``largest`` bytes, left out."""
    left_out = []
    part = archive.with_name(archive.name + ".part")
    with tarfile.open(part, "w:gz", compresslevel=6) as packed:
        for path in sorted(out.rglob("*")):
            if path.is_symlink() or not path.is_file():
                continue
            name = str(path.relative_to(out))
            if path.stat().st_size > largest:
                left_out.append(name)
            else:
                packed.add(path, arcname=f"{out.name}/{name}", recursive=False)
    os.replace(part, archive)
    return left_out


def tail(path: Path) -> str:
    """The last lines of a log, indented."""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - 8192))
        lines = log.read().decode(errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])


def run_all(
    jobs: Sequence[Job],
    out: Path,
    *,
    archive: Path,
    seconds: float | None,
    state: Path | None,
    largest: int,
    together: bool = False,
) -> list[Outcome]:
    """Run the jobs; a line each as it ends, the end of the log of one that failed, and an archive of all so far.

    Args:
        together: all at once and not one behind the other; for jobs that time nothing.
    """
    begun = time.monotonic()
    finished: set[str] = set(json.loads(state.read_text())) if state is not None and state.is_file() else set()
    outcomes: list[Outcome] = []

    def run(job: Job) -> Outcome:
        left = float("inf") if seconds is None else seconds - (time.monotonic() - begun)
        if job.name in finished and not job.again:
            return Outcome(job.name, "done before")
        if left < job.estimate:
            return Outcome(job.name, "no time", detail=f"{left:.0f} s are left, it is estimated at {job.estimate:g} s")
        return run_job(job, out, limit=min(job.limit, left))

    with ThreadPoolExecutor(max(1, len(jobs))) as pool, _ended_if_this_ends():
        side_by_side = [pool.submit(run, job) for job in jobs] if together else []
        for outcome in (done.result() for done in as_completed(side_by_side)) if together else map(run, jobs):
            outcomes.append(outcome)
            print(outcome.line(), flush=True)
            if outcome.failed and (log := out / f"{outcome.name}.log").is_file():
                print(tail(log), flush=True)
            if outcome.state == "done" and not outcome.missing:
                finished.add(outcome.name)
                if state is not None:
                    state.write_text(json.dumps(sorted(finished)) + "\n")
            (out / "summary.json").write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
            if left_out := pack(out, archive, largest=largest):
                print(f"    over {largest} bytes, so not in the archive: {', '.join(left_out)}", flush=True)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=Path, nargs="+", metavar="PLAN")
    parser.add_argument("--out", type=Path, required=True, help="folder of logs and results")
    parser.add_argument("--archive", type=Path, help="OUT.tar.gz if left out")
    parser.add_argument("--only", default="", help="parts of names, with commas between them")
    parser.add_argument("--skip", default="", help="parts of names, with commas between them")
    parser.add_argument("--seconds", type=float, help="for all jobs together; what does not fit is passed over")
    parser.add_argument("--state", type=Path, help="file of the jobs that succeeded, which are not run again")
    parser.add_argument("--cache", type=Path, help=f"Triton's cache on disk; as {CACHE} says if left out")
    parser.add_argument("--largest", type=int, default=4 << 20, help="bytes of a file that is packed")
    parser.add_argument("--together", action="store_true", help="run all at once; for jobs that time nothing")
    parser.add_argument("--list", action="store_true", help="show the jobs and run none")
    args = parser.parse_args(arguments)
    try:
        jobs = choose(read_plans(args.plans), only=args.only, skip=args.skip)
    except PlanError as error:
        parser.error(str(error))
    for name, path in (("--archive", args.archive), ("--state", args.state)):
        if path is not None and not path.parent.is_dir():
            parser.error(f"{name}: there is no folder {path.parent}")
    if args.list:
        for job in jobs:
            print(f"{job.name:28} {job.estimate:5g} s, at most {job.limit:5g} s  {' '.join(job.command)}")
        print(f"{sum(job.estimate for job in jobs):g} s are estimated for {len(jobs)} jobs")
        return 0
    if args.cache is not None:
        args.cache.mkdir(parents=True, exist_ok=True)
        os.environ[CACHE] = str(args.cache.resolve())
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    archive = out.with_name(out.name + ".tar.gz") if args.archive is None else args.archive
    outcomes = run_all(
        jobs,
        out,
        archive=archive,
        seconds=args.seconds,
        state=args.state,
        largest=args.largest,
        together=args.together,
    )
    print("\n" + "\n".join(outcome.line() for outcome in outcomes) + f"\n{archive}", flush=True)
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the job that runs, too
    sys.exit(main())
