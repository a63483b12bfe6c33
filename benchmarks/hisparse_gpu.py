"""HiSparse on a GPU: decode with room for a quarter of the requests' KV rows, beside an engine that holds them all.

    PYTHONPATH=. python benchmarks/hisparse_gpu.py --json benchmarks/results/hisparse-h200-DATE.json
    PYTHONPATH=. python benchmarks/hisparse_gpu.py --case A:90 --case A:resident     # only these
    PYTHONPATH=. python benchmarks/hisparse_gpu.py --device cpu --config tiny        # all of it, small, in a minute

For each slice (A, B, C; dummy weights), in this order:

    resident   all rows on the device, without HiSparse
    capped     room for a quarter of them, without HiSparse: as many requests at a time, none ever preempted, its best
    90 80 95   the same room with HiSparse; of each selection so many percent were in the one before
    chance     as those, with what random weights select
    free       room for all, with HiSparse: what it costs where there is no pressure

Prompts are not computed: pools are filled with random rows, keys and states, blocks find their places as if they had
been written, and what does not fit leaves for the host pool by the engine's own copies. Behind the indexer the
selection is replaced (``replayed_selections``), in every case but ``chance``, at the cost of a few small kernels in
all of them. Everything else is the real path in FULL graphs: residency, copies, attention, sampling, the step
launched ahead.

Tokens are drawn at temperature 1, since greedy sequences go round in circles, some of them together. ``experts`` counts
those that a step's tokens choose between them, layer by layer: each is read whole, so what differs in them by more than
5 % is not compared, and ``apart`` says so.

``still_ms`` is the same engine with an overlap of 100 %, when nothing is copied. What a case takes longer is exposed;
the rest of ``copy_ms``, the profiler's time of the copies (from the bytes at 53 GB/s without a GPU), is hidden. The
file is written anew after each case. A trace of one step of each case with copies is written beside it; draw it with
``scripts/trace_timeline.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

from benchmarks import step_trace
from benchmarks.hisparse_slices import BLOCK, SAMPLES, SLICES, Slice
from benchmarks.replayed_selections import SELECTIONS
from sidestream.engine.bench.floor import decode_floor
from sidestream.engine.bench.latency import WARM_STEPS
from sidestream.errors import SidestreamError

CASES = ("resident", "capped", "90", "80", "95", "chance", "free")
BUS_BYTES_PER_S = 53e9
ALIKE = 0.05
"""By which share two cases that are compared may differ in the experts that they read."""
FAILURES = (RuntimeError, AssertionError, OSError, ValueError, TypeError, AttributeError, SidestreamError, TritonError)
"""What ends one case, and not those behind it."""


def run_case(found: Slice, case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one case of a slice."""
    engine = case if case in ("resident", "capped", "free") else "pressed"
    built, decoding = found.running(engine)
    overlap = None if case == "chance" else int(case) / 100 if case.isdigit() else 0.9
    batch = args.batch // 4 if engine == "capped" else args.batch
    row: dict[str, Any] = {"case": f"{found.letter}:{case}", "overlap": overlap, "batch": batch}
    row |= {"rows": built.config.kv_cache_dtype, "host_pool": engine not in ("resident", "capped")}
    if engine == "pressed":
        found.select(built, 1.0)
        decoding.times(args.warm)
        row["still_ms"] = summary(decoding.times(args.steps), batch)["ms"]
        row["still_experts"] = rounded(found.chosen(built, decoding)[0])
    hisparse = built.runner.hisparse
    found.select(built, overlap)
    decoding.times(args.warm)
    experts = found.chosen(built, decoding)
    with built.runner.on_device():
        before = hisparse.stats() if hisparse is not None else None
    row |= summary(decoding.times(args.steps), batch)
    with built.runner.on_device():
        after = hisparse.stats() if hisparse is not None else None
    experts = (experts + found.chosen(built, decoding)) / 2
    row["experts"], row["experts_of_a_quarter"] = rounded(experts[0]), rounded(experts[1])
    if before is not None and after is not None:
        steps = args.steps + WARM_STEPS
        missed = (after.missed_rows - before.missed_rows) / steps
        selected = (after.selected_rows - before.selected_rows) / steps
        a_row = built.pools.groups.kv.bytes_per_block / BLOCK / len(built.runner.attention.groups)
        row |= {
            "selected_rows_a_step": selected,
            "missed_rows_a_step": missed,
            "hit_rate": 1 - missed / selected if selected else 1.0,
            "bus_ms": 1e3 * missed * a_row / BUS_BYTES_PER_S,
            "spilled_blocks": after.spilled_blocks,
            "restored_blocks": after.restored_blocks,
            "free_device_blocks": after.free_device_blocks,
        }
    if engine == "pressed":
        found.select(built, overlap)
        decoding.times(args.warm)
        events = step_trace.record(decoding.core.step, on_gpu=args.device == "cuda")
        row |= step_trace.copies(events) if events else {"copy_ms": 0.0}
        if args.json is not None and events:
            path = args.json.with_name(f"{args.json.stem}-{found.letter}-{case}.trace.json")
            step_trace.write(path, events, {"case": row["case"], "device": device_name(args), "batch": batch})
            row["trace"] = path.name
        copy_ms = row["copy_ms"] or row["bus_ms"]
        row["apart"] = differ(row, "experts", row, "still_experts")
        if not row["apart"]:
            row["exposed_ms"] = row["ms"] - row["still_ms"]
            row["hidden"] = max(0.0, 1 - max(row["exposed_ms"], 0.0) / copy_ms) if copy_ms else 1.0
    kept = {"kv_cache_dtype": built.config.kv_cache_dtype, "dtype": built.config.dtype}
    row["floor_ms"] = decode_floor(built.config.model, batch=batch, context=args.context, **kept).ms()
    return row


def rounded(layers: torch.Tensor) -> list[float]:
    return [round(float(count), 1) for count in layers]


def summary(times: Sequence[float], batch: int) -> dict[str, float]:
    ordered = sorted(times)
    ms = statistics.median(ordered)
    return {"ms": ms, "p90": ordered[int(0.9 * len(ordered))], "tokens_per_s": 1e3 * batch / ms}


def differ(row: dict[str, Any], kind: str, other: dict[str, Any], others: str) -> list[str]:
    """Why two cases are not compared: one line if over all layers one read more experts than the other, else none."""
    mine, theirs = row[kind], other[others]
    if abs(sum(mine) - sum(theirs)) <= ALIKE * max(sum(mine), sum(theirs)):
        return []
    return [f"{row['case']} {kind} {mine}, {other['case']} {others} {theirs}: over {ALIKE:.0%} apart"]


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every case beside those of its slice that were measured: the bars, and what the floors allow.

    ``apart`` says which comparisons are left out since the tokens of one chose more experts.
    """
    by_case = {row["case"]: row for row in rows if "ms" in row}
    results = []
    for row in rows:
        letter, _, case = row["case"].partition(":")
        resident, capped = by_case.get(f"{letter}:resident"), by_case.get(f"{letter}:capped")
        more: dict[str, Any] = {}
        apart = list(row.get("apart", ()))
        if "ms" in row and resident is not None and case not in ("resident", "capped"):
            found = differ(row, "experts", resident, "experts")
            apart += found
            if not found:
                more["of_resident"] = row["tokens_per_s"] / resident["tokens_per_s"]
                bar = {"90": 0.85, "free": 0.99}.get(case)
                if bar is not None:
                    more |= {"bar": bar, "met": more["of_resident"] >= bar}
        if "ms" in row and capped is not None and "bus_ms" in row:
            found = differ(row, "experts_of_a_quarter", capped, "experts_of_a_quarter")
            apart += found
            if not found:
                more["over_capped"] = row["tokens_per_s"] / capped["tokens_per_s"]
                floor = max(row["floor_ms"], row["bus_ms"])
                more["bound_over_capped"] = row["batch"] / floor / (capped["batch"] / capped["floor_ms"])
        row = {key: value for key, value in row.items() if key != "apart"}
        results.append(row | more | ({"apart": apart} if apart else {}))
    return results


def chosen(args: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Slices with their cases, in order of importance."""
    asked = args.case or [f"{letter}:{case}" for letter in SLICES for case in CASES]
    for name in asked:
        letter, _, case = name.partition(":")
        if letter not in SLICES or case not in CASES:
            raise SystemExit(f"--case {name!r} is none of {', '.join(SLICES)} with one of {', '.join(CASES)}: 'A:90'")
    for letter in SLICES:
        mine = [case for case in CASES if f"{letter}:{case}" in asked]
        if mine:
            yield letter, mine


def device_name(args: argparse.Namespace) -> str:
    return str(torch.cuda.get_device_name()) if args.device == "cuda" else "cpu"


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", metavar="SLICE:CASE", help="again for more; all by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--config", choices=("real", "tiny"), default="real")
    parser.add_argument("--kv-cache-dtype", help="of all slices; each has its own by default")
    parser.add_argument("--batch", type=int, help="requests, a multiple of 4 [32; tiny: 4]")
    parser.add_argument("--context", type=int, help="tokens of each [32768; tiny: 1024]")
    parser.add_argument(
        "--batched-tokens", type=int, help="of a step while prompts take their places [8192; tiny: 256]"
    )
    parser.add_argument("--hot-factor", type=int, default=2)
    parser.add_argument("--watermark", type=float, default=0.125)
    parser.add_argument("--warm", type=int, default=12, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, help="timed [40; tiny: 6]")
    parser.add_argument("--memory-limit", default="130GiB")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds a slice; cases left then are skipped")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    tiny = args.config == "tiny"
    args.batch = args.batch or (4 if tiny else 32)
    args.context = args.context or (1024 if tiny else 32768)
    args.batched_tokens = args.batched_tokens or (256 if tiny else 8192)
    args.steps = args.steps or (6 if tiny else 40)
    if args.device == "cpu":
        args.memory_limit = "4GiB"
    if args.batch < 4 or args.batch % 4:
        raise SystemExit(f"--batch is {args.batch}; a quarter of it is to fit, so it must be a multiple of 4")
    if args.warm + 2 * WARM_STEPS + args.steps + 2 * SAMPLES > SELECTIONS:
        raise SystemExit(f"--warm {args.warm} and --steps {args.steps} need more than the {SELECTIONS} selections")
    return args


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    args = parsed(arguments)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    about = {"command": " ".join(["python", *sys.argv]), "device": device_name(args), "torch": torch.__version__}
    about |= {name: getattr(args, name) for name in ("config", "batch", "context", "hot_factor", "watermark", "steps")}
    about["filled"] = "random rows, keys and states straight into the pools; blocks placed and spilled by the engine"

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        shown = compared(rows)
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in shown[-1].items()}, flush=True)
        if args.json is not None:
            whole = json.dumps(about | {"seconds": round(time.perf_counter() - began, 1), "cases": shown}, indent=1)
            partly = args.json.with_suffix(".partly")
            partly.write_text(whole + "\n")
            partly.replace(args.json)

    began = time.perf_counter()
    for letter, cases in chosen(args):
        started = time.perf_counter()
        try:
            found = Slice(letter, args, cases=len(CASES))
        except FAILURES as error:  # the next slice may still fit
            keep({"case": f"{letter}:start", "wrong": f"{type(error).__name__}: {error}"[:500]})
            continue
        print(f"slice {letter} is ready after {found.startup_s:.1f} s", flush=True)
        for case in cases:
            if time.perf_counter() - started > args.limit:
                keep({"case": f"{letter}:{case}", "wrong": f"skipped: --limit {args.limit:.0f} seconds are over"})
                continue
            try:
                at = time.perf_counter()
                row = run_case(found, case, args)
                keep(row | {"seconds": round(time.perf_counter() - at, 1), "startup_s": round(found.startup_s, 1)})
            except FAILURES as error:
                keep({"case": f"{letter}:{case}", "wrong": f"{type(error).__name__}: {error}"[:500]})
        found.close()
        del found
    return compared(rows)


if __name__ == "__main__":
    if any("wrong" in row or "apart" in row for row in main()):
        sys.exit("some cases failed, were skipped or read other experts than those beside them")
