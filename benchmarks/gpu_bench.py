"""Every GPU benchmark in turn, one table, one file.

Each runs in a process of its own, so that one which fails takes nothing with it; what failed is in the table and in the
file, and makes the exit code 1. Of a kernel's many ways to be launched the fastest stands in the table; all are in the
file.

    PYTHONPATH=. python benchmarks/gpu_bench.py                       # everything, about half an hour
    PYTHONPATH=. python benchmarks/gpu_bench.py --only decode,kda     # parts of names
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.batch import Job, run_job

HERE = Path(__file__).parent
CONFIGS = HERE / "configs"
MODELS = HERE.parent / "sidestream" / "assets" / "configs"
GROUPED_BY = (
    "shape",
    "kind",
    "name",
    "layout",
    "rope",
    "tokens",
    "batch",
    "heads",
    "width",
    "context",
    "rows",
    "streams",
)
"""Fields that say what was measured; all others say how."""
BARS = ("bar", "bar_us")
FLOORS = ("floor", "floor_us")


@dataclass(frozen=True, slots=True)
class Bench:
    """A script, and where its result goes among its arguments (``OUT``)."""

    name: str
    arguments: tuple[str, ...]


def engine_bench(name: str, config: Path, cases: str, *more: str) -> Bench:
    """``decode_gpu.py`` for cases such as "1x8192 32x8192"."""
    asked = [part for case in cases.split() for part in ("--case", *case.split("x"))]
    return Bench(name, ("benchmarks/decode_gpu.py", "--config", str(config), *asked, *more, "--json", "OUT"))


def benches() -> list[Bench]:
    kernels = sorted(path.name for path in (HERE / "kernels").glob("bench_*.py"))
    found = [Bench(name[6:-3], (f"benchmarks/kernels/{name}", "OUT")) for name in kernels]
    found.append(Bench("streams", ("benchmarks/streams_gpu.py", "--json", "OUT")))
    found.append(Bench("prefix cache", ("benchmarks/prefix_gpu.py", "--json", "OUT")))
    a, both = CONFIGS / "glm5-next-slice-a.json", "1x8192 32x8192"
    prefills = ("--prefill", "8192", "32768")
    found.append(engine_bench("decode A", a, "1x2048 1x32768 8x8192 32x8192 64x8192", "--repeats", "5", *prefills))
    found.append(engine_bench("decode A long", a, "1x131072"))
    found.append(engine_bench("decode A piecewise", a, "32x8192", "--mode", "piecewise"))
    found.append(
        engine_bench("decode B", CONFIGS / "deepseek-v32-slice-b.json", both, "--kv-cache-dtype", "fp8_ds_mla")
    )
    found.append(engine_bench("decode C", CONFIGS / "glm-moe-dsa-slice-c.json", both))
    for mode in ("none", "piecewise", "full"):
        more = ("--mode", mode, "--max-num-batched-tokens", "2048", "--memory-limit", "97%")
        found.append(engine_bench(f"decode Kimi-Linear 48B {mode}", MODELS / "kimi-linear-48b.json", both, *more))
    return found


def timings(found: Any) -> Iterator[dict[str, Any]]:
    """Every object with a time in microseconds, however deep."""
    if isinstance(found, dict):
        if isinstance(found.get("us"), int | float):
            yield found
        for value in found.values():
            yield from timings(value)
    elif isinstance(found, list):
        for value in found:
            yield from timings(value)


def table_of(name: str, found: Any) -> list[str]:
    """A line a thing measured: the fastest way, beside bar and floor."""
    if isinstance(found, dict) and "decode" in found:
        lines = [
            f"{name:24} {row['batch']:4} x {row['context']:<7} {row['median']:9.3f} ms  {row['to_floor']:5.2f} x floor"
            f"{'  vLLM 0.33 ' + str(row['vllm_ms']) + ' ms' if row.get('vllm_ms') else ''}"
            for row in found["decode"]
        ]
        return lines + [
            f"{name:24} prefill {row['tokens']:<7} {row['tokens_per_s']:9,.0f} tokens/s" for row in found["prefill"]
        ]
    fastest: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in timings(found):
        key = tuple(f"{field} {row[field]}" for field in GROUPED_BY if field in row)
        if key not in fastest or row["us"] < fastest[key]["us"]:
            fastest[key] = row
    lines = []
    for key, row in fastest.items():
        beside = [f"bar {row[field]}" for field in BARS if row.get(field) is not None]
        beside += [f"{row['us'] / row[field]:.2f} x floor" for field in FLOORS if row.get(field)]
        lines.append(f"{name:24} {', '.join(key):44} {row['us']:9.2f} us  {'  '.join(beside)}")
    return lines


def run(bench: Bench, limit: float) -> dict[str, Any]:
    """Result, seconds, and what was wrong."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        arguments = tuple(str(out) if part == "OUT" else part for part in bench.arguments)
        job = Job(name="bench", command=("{python}", *arguments), limit=limit, estimate=limit)
        outcome = run_job(job, Path(folder), limit=limit)
        log = (Path(folder) / "bench.log").read_text(errors="replace")
        wrong = f"{outcome.detail}: {log.strip()[-2000:]}" if outcome.failed else ""
        result = json.loads(out.read_text()) if out.exists() and out.stat().st_size else None
    seconds = round(time.perf_counter() - started, 1)
    return {"command": " ".join(["python", *bench.arguments]), "seconds": seconds, "wrong": wrong, "result": result}


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown: {error}"


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of names, with commas between them")
    parser.add_argument("--json", type=Path, default=HERE / "results" / f"h200-{time.strftime('%Y-%m-%d')}.json")
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each")
    args = parser.parse_args()
    wanted = [part for part in args.only.split(",") if part]
    chosen = [b for b in benches() if not wanted or any(part in b.name for part in wanted)]
    results: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "commit": args.commit,
        "date": time.strftime("%Y-%m-%d"),
        "device": driver(),
        "versions": {"python": platform.python_version(), **{p: metadata.version(p) for p in ("torch", "triton")}},
        "benches": {},
    }
    failed = []
    for bench in chosen:
        found = run(bench, args.limit)
        results["benches"][bench.name] = found
        for line in table_of(bench.name, found["result"]):
            print(line)
        if found["wrong"]:
            failed.append(bench.name)
            print(f"{bench.name:24} FAILED: {found['wrong'].splitlines()[-1]}")
        sys.stdout.flush()
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
