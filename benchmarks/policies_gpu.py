"""What handoff policy ``external`` gains over ``stream`` on slice A: decode steps in pieces, and a trace of each.

Rounds of both policies and of one full graph are taken in turns, in a row as the engine core issues steps. Under
``stream`` a break waits for all that the side stream was given so far; under ``external`` for the event that its own
handoff published.

    PYTHONPATH=. python benchmarks/policies_gpu.py --json benchmarks/results/policies-h200-DATE.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import step_trace
from benchmarks.gpu_steps import STEPS, wall_us
from benchmarks.streams_gpu import decode_step, slice_engine
from sidestream import __version__
from sidestream.engine.build import BuiltEngine, in_graph_mode

WAYS = {"external": ("piecewise", "external"), "stream": ("piecewise", "stream"), "full": ("full", "external")}
"""Name -> graph mode, handoff policy."""
BATCHES = (1, 8, 32)
CONTEXT = 2048
ROUNDS = 15


def compare(engines: dict[str, BuiltEngine], batch: int) -> dict[str, Any]:
    """Milliseconds a step of each way, medians of rounds in turns; ``external`` beside ``stream`` pair by pair."""
    steps = {name: decode_step(engine, batch, CONTEXT) for name, engine in engines.items()}
    for step in steps.values():
        for _ in range(STEPS):
            step()
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            rounds[name].append(1e-3 * wall_us(step))
    pairs = [ours / theirs for ours, theirs in zip(rounds["external"], rounds["stream"], strict=True)]
    medians = {name: statistics.median(times) for name, times in rounds.items()}
    return {
        "batch": batch,
        "context": CONTEXT,
        "ms": medians,
        "external_to_stream": statistics.median(pairs),
        "piecewise_to_full": medians["external"] / medians["full"],
        "rounds_ms": rounds,
    }


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="traces are written beside it")
    args = parser.parse_args(given)
    if not args.json.parent.is_dir():
        parser.error(f"--json: there is no folder {args.json.parent}")
    results: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "versions": {"sidestream": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "decode": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        built = slice_engine(Path(folder), max(BATCHES))
    config = replace(built.config, max_capture_tokens=1)
    engines = {}
    for name, (mode, policy) in WAYS.items():
        engines[name] = in_graph_mode(replace(built, config=replace(config, stream_policy=policy)), mode)
    for batch in BATCHES:
        row = compare(engines, batch)
        results["decode"].append(row)
        args.json.write_text(json.dumps(results, indent=1) + "\n")
        ms = ", ".join(f"{name} {value:.3f}" for name, value in row["ms"].items())
        print(f"batch {batch:2}: ms {ms}; external {row['external_to_stream']:.4f} of stream", flush=True)
    for name in ("external", "stream"):
        events = step_trace.record(decode_step(engines[name], max(BATCHES), CONTEXT), on_gpu=True)
        what = {"slice": "A", "mode": "piecewise", "policy": name, "batch": max(BATCHES), "context": CONTEXT}
        step_trace.write(args.json.with_suffix(f".{name}.trace.json"), events, what)
        print(f"{name}: a step of {step_trace.span(events):.0f} us in its trace" if events else f"{name}: no trace")


if __name__ == "__main__":
    main()
