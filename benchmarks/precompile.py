"""Fills Triton's cache on disk with what engines of a plan will launch, on all cores, before the first of them starts.

    PYTHONPATH=. python benchmarks/precompile.py benchmarks/plans/whole-engine.json --json kernels.json

A start compiles its kernels one after the other as it meets them. Here each start is rehearsed without a GPU
(``rehearsal.py``), and what it would compile is compiled by as many processes as there are cores; a real start then
reads the cache (``TRITON_CACHE_DIR``). It needs no GPU, but the same Triton, and the cache at the same path.

A plan's starts are its jobs that run ``decode_gpu.py``; equal ones are rehearsed once. A stamp in the cache says what
was compiled for which sources, so that a second run on the same machine ends at once.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton

from benchmarks.batch import read_plans
from benchmarks.decode_gpu import arguments_of, engine_of, settings_of
from benchmarks.rehearsal import Kernel, PretendedDriver, rehearse
from sidestream.config.engine import EngineConfig

SCRIPT = "benchmarks/decode_gpu.py"
SOURCES = Path(__file__).parents[1] / "sidestream"


@dataclass(frozen=True, slots=True)
class Start:
    """A model's config file, and the settings of an engine that decide what it launches."""

    config: Path
    user: EngineConfig

    @property
    def name(self) -> str:
        return f"{self.config.stem} {self.user.cudagraph_mode} {self.user.kv_cache_dtype}"


def starts_of(plans: Sequence[Path]) -> list[Start]:
    """Without two that differ only in what no kernel is compiled for: lengths and sizes beyond the largest."""
    found: dict[tuple[Any, ...], Start] = {}
    for job in read_plans(plans):
        if SCRIPT not in job.command:
            continue
        given = [part.replace("{out}", ".") for part in job.command[job.command.index(SCRIPT) + 1 :]]
        args = arguments_of(given)
        settings = settings_of(args)
        user = replace(
            engine_of(args),
            load_format="dummy",
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            enable_prefix_caching=False,
        )
        key = (args.config, user.cudagraph_mode, user.dtype, user.kv_cache_dtype)
        other = found.get(key)
        if other is not None:
            most = {
                name: max(getattr(user, name), getattr(other.user, name)) for name in ("max_num_seqs", "max_model_len")
            }
            user = replace(user, **most)
        found[key] = Start(args.config, user)
    return list(found.values())


def kernels_of(start: Start) -> list[Kernel]:
    """In a process of its own, since it pretends that there is a GPU."""
    return rehearse(start.config, start.user)


def begin() -> None:
    """In a process that compiles."""
    triton.runtime.driver.set_active(PretendedDriver())


def compile_kernel(kernel: Kernel) -> float:
    """Seconds that it took."""
    began = time.perf_counter()
    module, _, function = kernel.name.rpartition(".")
    getattr(importlib.import_module(module), function).preload(kernel.data)
    return time.perf_counter() - began


def precompile(starts: Sequence[Start], *, workers: int) -> dict[str, Any]:
    """Rehearse each start and compile every kernel once; what that took, by start and by function."""
    began = time.perf_counter()
    found: dict[str, Any] = {"starts": {}, "functions": {}, "failed": []}
    spawn = get_context("spawn")
    compiled: dict[tuple[str, str], Future[float]] = {}
    with (
        ProcessPoolExecutor(min(len(starts), workers), spawn, max_tasks_per_child=1) as rehearsals,
        ProcessPoolExecutor(workers, spawn, begin) as compilers,
    ):
        waiting = {rehearsals.submit(kernels_of, start): start for start in starts}
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                start = waiting.pop(future)
                seconds = round(time.perf_counter() - began, 1)
                error = future.exception()
                if error is not None:
                    found["failed"].append({"start": start.name, "error": repr(error)})
                    print(f"{start.name}: FAILED: {error!r}", flush=True)
                    continue
                kernels = future.result()
                stages = Counter(kernel.stage for kernel in kernels)
                found["starts"][start.name] = {"rehearsed_after_s": seconds, "kernels": len(kernels), **stages}
                print(f"{start.name}: {len(kernels)} kernels, rehearsed after {seconds} s", flush=True)
                for kernel in kernels:
                    key = (kernel.name, kernel.specialised)
                    if key not in compiled:
                        compiled[key] = compilers.submit(compile_kernel, kernel)
        for (name, _), compilation in compiled.items():
            error = compilation.exception()
            if error is not None:
                found["failed"].append({"kernel": name, "error": repr(error)})
                print(f"{name}: FAILED: {error!r}", flush=True)
                continue
            of_it = found["functions"].setdefault(name.removeprefix("sidestream.ops."), {"kernels": 0, "seconds": 0.0})
            of_it["kernels"] += 1
            of_it["seconds"] = round(of_it["seconds"] + compilation.result(), 2)
    return found | {"kernels": len(compiled), "workers": workers, "seconds": round(time.perf_counter() - began, 1)}


def stamp_of(starts: Sequence[Start]) -> Path:
    """The file in Triton's cache that is there once these starts were compiled from these sources."""
    digest = hashlib.sha256(repr((triton.__version__, sys.version, starts)).encode())
    for path in sorted(SOURCES.rglob("*.py")):
        digest.update(path.read_bytes())
    return Path(triton.knobs.cache.dir) / f"precompiled-{digest.hexdigest()[:16]}.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=Path, nargs="+", metavar="PLAN")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help="show the starts and compile nothing")
    args = parser.parse_args()
    starts = starts_of(args.plans)
    if not starts:
        parser.error(f"no job of these plans runs {SCRIPT}")
    if args.list:
        for start in starts:
            print(json.dumps({"name": start.name, **asdict(start.user)}, default=str))
        return 0
    stamp = stamp_of(starts)
    if stamp.is_file():
        print(f"all of it was compiled before, as {stamp} says")
        if args.json:
            args.json.write_text(stamp.read_text())
        return 0
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU that is there is not to be asked
    found = precompile(starts, workers=args.workers)
    functions = sorted(found["functions"].items(), key=lambda entry: -entry[1]["seconds"])
    for name, taken in functions:
        print(f"{taken['seconds']:8.2f} s {taken['kernels']:4} {name}")
    total = sum(taken["seconds"] for _, taken in functions)
    print(
        f"{found['kernels']} kernels, {total:.1f} s of compilation by {args.workers} processes in {found['seconds']} s"
    )
    written = json.dumps(found, indent=1) + "\n"
    if args.json:
        args.json.write_text(written)
    if not found["failed"]:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(written)
    return int(bool(found["failed"]))


if __name__ == "__main__":
    sys.exit(main())
