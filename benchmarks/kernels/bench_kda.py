"""Time KDA on a GPU, decode steps and prompts: every launch against the formula first, then a table.

    PYTHONPATH=. python benchmarks/kernels/bench_kda.py [results.json] [--only decodes|prompts] [--rows 8 64]

The shape is GLM-5.3-Flash's: 64 heads of 128, bf16, fp32 state. Floor of a decode step: the state of each row read once
and written once (8.4 MB) at 4.28 TB/s; times are medians of graphs of 20 calls, replayed in turns. Beside it stands
what a kernel that only scales the states in place takes, and one that moves the convolution's rings, too (0.2 MB a
row): nothing that reads and writes them all can be faster. "In a layer" is what a step adds to the two projections
around it, which decide when it can start and what may start before it ends. Floor of a prompt's chunked product: see
``triton_chunked``; times are medians of eager calls. A launch that was wrong, or a batch for which no time was left
(``BENCH_SECONDS`` of it, once all are compiled), makes the exit status 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.kernels.kda_prompts import (
    CHUNKS,
    DIM,
    HEADS,
    WINDOW,
    check_chunks,
    error,
    time_convolutions,
    time_prompts,
)
from benchmarks.kernels.results import keep, out_file
from sidestream.core.ring import plan_ring
from sidestream.ops.kda import reference, triton_chunked
from sidestream.ops.kda.triton_decode import PLAIN, Launch, decode_step, usual_launch
from sidestream.ops.linear import linear, triton_linear
from sidestream.ops.linear.launches import launch_for

HIDDEN = 4096
BYTES_PER_S = 4.28e12
BATCHES = (64, 8, 32, 1, 16, 128, 4, 2)
"""Rows of a step, the weightier first: time may run out."""
BARS = {1: 8.0, 64: 1.1 * 125.4, 128: 1.1 * 250.9}
"""Microseconds of a decode step, from the convolution to the gated norm."""
CALLS, REPLAYS, BUDGET_S = 20, 15, float(os.environ.get("BENCH_SECONDS", "25"))
L2_BYTES = 100e6
WORST = 0.02
"""Relative error in norm: bf16 results against fp32 ones."""


def steps_of(batches: Iterable[int]) -> list[Launch]:
    """What is launched for so many rows, each once."""
    return list(dict.fromkeys(map(usual_launch, batches)))


def arguments(rows: int, seed: int) -> dict[str, Any]:
    gen = torch.Generator(device="cuda").manual_seed(seed)

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=gen).to(dtype)

    width, slots = HEADS * DIM, [rows - r for r in range(rows)]
    starts = [0 if r == 1 else 900 + 7 * r for r in range(rows)]
    plan = plan_ring(starts, [1] * rows, slots, window=WINDOW, ring_length=WINDOW - 1, device=torch.device("cuda"))
    return {
        "projected": randn(rows, 3 * width + 2 * DIM + HEADS),
        "conv_state": randn((rows + 1) * (WINDOW - 1), 3 * width),
        "state": randn(rows + 1, 1, HEADS, DIM, DIM, dtype=torch.float32),
        "conv_weight": randn(WINDOW, 3 * width, dtype=torch.float32).t(),
        "plan": plan,
        "expand": randn(2, width, DIM) / DIM**0.5,
        "dt_bias": randn(width, dtype=torch.float32),
        "A_log": randn(HEADS, dtype=torch.float32),
        "lower_bound": -5.0,
        "norm_weight": randn(DIM),
        "norm_eps": 1e-5,
        "slots": torch.tensor(slots, device="cuda"),
        "start": torch.tensor(starts, device="cuda"),
    }


def on_cpu(made: dict[str, Any]) -> dict[str, Any]:
    host = {name: value.cpu().clone() if isinstance(value, torch.Tensor) else value for name, value in made.items()}
    return {**host, "plan": made["plan"].moved([tensor.cpu() for tensor in made["plan"].tensors])}


def captured(call: Callable[[dict[str, Any]], object], sets: list[dict[str, Any]]) -> torch.cuda.CUDAGraph:
    """``CALLS`` calls over the sets in turn."""
    call(sets[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for i in range(CALLS):
            call(sets[i % len(sets)])
    graph.replay()
    return graph


def timed(calls: Mapping[str, Callable[[dict[str, Any]], object]], sets: list[dict[str, Any]]) -> dict[str, float]:
    """Median microseconds a call of each, their graphs replayed in turns so that the clock is the same for all."""
    spans: dict[str, list[float]] = {name: [] for name in calls}
    with torch.cuda.stream(torch.cuda.Stream()):
        graphs = {name: captured(call, sets) for name, call in calls.items()}
        for _ in range(REPLAYS):
            for name, graph in graphs.items():
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                spans[name].append(begin.elapsed_time(end) * 1e3 / CALLS)
    return {name: statistics.median(each) for name, each in spans.items()}


@triton.jit  # type: ignore[untyped-decorator]
def _scale_states(
    state: tl.tensor,
    ring: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    LENGTH: tl.constexpr,
    RINGS: tl.constexpr,
) -> None:
    piece = tl.program_id(0).to(tl.int64)
    column = (piece % (D // COLUMNS)) * COLUMNS + tl.arange(0, COLUMNS)
    at = state + (piece // (D // COLUMNS)) * D * D + tl.arange(0, D)[:, None] * D + column[None, :]
    old = tl.load(at)
    if RINGS:
        pieces: tl.constexpr = H * (D // COLUMNS)
        mine, past = tl.arange(0, 4 * COLUMNS), tl.arange(0, 4)
        first = ring + piece // pieces * (LENGTH * 3 * H * D) + piece % pieces * (3 * COLUMNS) + mine
        real = (past < LENGTH)[:, None] & (mine < 3 * COLUMNS)[None, :]
        held = tl.load(first[None, :] + past[:, None] * (3 * H * D), mask=real, other=float("inf"))
        tl.store(first, tl.min(held.to(tl.float32), axis=0), mask=mine < 3 * COLUMNS)
    tl.store(at, old * 0.999)


def scale_states(made: dict[str, Any], rings: bool) -> None:
    """Moves the bytes of a step's states, and with ``rings`` those of the convolution: all read, one row written."""
    states, held = made["state"][1:], made["conv_state"][WINDOW - 1 :]
    programs = states.numel() // (DIM * 64)
    _scale_states[(programs,)](states, held, HEADS, DIM, 64, WINDOW - 1, rings, num_warps=4)


MOVES = {
    f"states{name} moved": partial(scale_states, rings=rings) for name, rings in (("", False), (" and rings", True))
}


def check(launch: Launch) -> float:
    """Largest relative error of output and state, right behind a projection that lets this step start early."""
    rows = 7
    decode_step(**arguments(rows, seed=2), launch=launch)  # compiled, so that the next one is not late
    base = arguments(rows, seed=1)
    x = torch.randn(rows, 256, device="cuda").bfloat16()
    weight = torch.randn(base["projected"].shape[1], 256, device="cuda").bfloat16() / 16
    tiles = launch_for(rows, *weight.shape)
    assert tiles is not None
    truth = on_cpu({**base, "projected": triton_linear.linear(x, weight, None, launch=tiles)})
    want = reference.decode_step(**truth)
    out = decode_step(**{**base, "projected": triton_linear.linear(x, weight, None, launch=tiles)}, launch=launch)
    assert torch.equal(base["conv_state"].cpu(), truth["conv_state"]), launch
    return max(error(out, want), error(base["state"][1:], truth["state"][1:]))


def check_many(launches: Iterable[Launch], rows: int) -> dict[str, float]:
    """Largest relative error against the plain kernel, whose loads nobody ordered; infinite unless twice the same."""
    base = arguments(rows, seed=1)

    def step(launch: Launch) -> tuple[torch.Tensor, ...]:
        mine = {**base, **{name: base[name].clone() for name in ("state", "conv_state")}}
        torch.cuda.synchronize()
        return decode_step(**mine, launch=launch), mine["state"][1:], mine["conv_state"][WINDOW - 1 :]

    plain, found = step(PLAIN), {}
    for launch in launches:
        first, second = step(launch), step(launch)
        errors = (float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(first, plain, strict=True))
        found[str(launch)] = max(errors) if all(map(torch.equal, first, second)) else float("inf")
    return found


def first_run(task: Launch | triton_chunked.Launch | int) -> tuple[float, str]:
    """In a process of its own, so that all compile side by side: (error, what went wrong). A number is that of the rows
    of what else is timed, which only compiles."""
    torch.set_num_threads(1)
    try:
        if isinstance(task, int):
            Projections(task)()
            for move in MOVES.values():
                move(arguments(task, seed=0))
            return 0.0, ""
        found = check(task) if isinstance(task, Launch) else check_chunks(task)
    except Exception as problem:  # noqa: BLE001  # a launch that cannot run is a result
        return float("inf"), repr(problem)[:300]
    return found, ""


class Projections:
    """The two around a decode step, and what they take."""

    def __init__(self, rows: int) -> None:
        columns, width = 3 * HEADS * DIM + 2 * DIM + HEADS, HEADS * DIM
        self.x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        self.weight = torch.randn(columns, HIDDEN, device="cuda").bfloat16() / HIDDEN**0.5
        self.behind = torch.randn(HIDDEN, width, device="cuda").bfloat16() / width**0.5
        self.mixed = torch.randn(rows, width, device="cuda").bfloat16()

    def __call__(self, _made: dict[str, Any] | None = None) -> None:
        linear(self.x, self.weight, None)
        linear(self.mixed, self.behind, None)

    def around(self, launch: Launch, made: dict[str, Any]) -> None:
        projected = linear(self.x, self.weight, None)
        linear(decode_step(**{**made, "projected": projected}, launch=launch), self.behind, None)


def time_decodes(
    right: Collection[Launch], batches: Iterable[int], results: dict[str, Any], until: float, path: Path | None
) -> list[str]:
    """What is in use at each batch that is begun by then, if it is right. Returns the batches that were not begun."""
    missed = []
    for rows in batches:
        launch = usual_launch(rows)
        if time.monotonic() > until:
            missed.append(f"batch {rows}")
        elif launch in right:
            floor = 8 * rows * HEADS * DIM * DIM / BYTES_PER_S * 1e6
            results["shapes"][rows] = {"floor_us": floor, "bar_us": BARS.get(rows)} | time_step(launch, rows)
            keep(path, results)
            print_step(rows, results["shapes"][rows])
    return missed


def time_step(launch: Launch, rows: int) -> dict[str, Any]:
    """Microseconds of the launch, alone and as what it adds to the projections before and behind it."""
    count = min(CALLS, max(2, int(L2_BYTES // (4 * rows * HEADS * DIM * DIM)) + 1))
    sets, around = [arguments(rows, seed=i) for i in range(count)], Projections(rows)
    alone = timed({"step": partial(_step, launch), **MOVES}, sets)
    layer = timed({"layer": partial(around.around, launch), "projections": around}, sets)
    parts = {**{name: alone[name] for name in MOVES}, "projections": layer["projections"]}
    added = layer["layer"] - layer["projections"]
    return {"launch": str(launch), "us": alone["step"], "in_layer_us": added, "parts_us": parts}


def _step(launch: Launch, made: dict[str, Any]) -> None:
    decode_step(**made, launch=launch)


def print_step(rows: int, found: dict[str, Any]) -> None:
    bar = "-" if found["bar_us"] is None else f"{found['bar_us']:.1f}"
    parts = ", ".join(f"{name} {value:.1f} us" for name, value in found["parts_us"].items())
    print(f"batch {rows}: floor {found['floor_us']:.1f} us, bar {bar} us, {parts}")
    alone, layer, ratio = found["us"], found["in_layer_us"], found["us"] / found["floor_us"]
    print(f"  {layer:8.2f} us in a layer {alone:8.2f} us alone {ratio:5.2f} x floor  {found['launch']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=out_file)
    parser.add_argument("--only", choices=("decodes", "prompts"))
    parser.add_argument("--rows", type=int, nargs="+", default=BATCHES, help="of the decode steps that are timed")
    args = parser.parse_args()
    if min(args.rows) < 1:
        parser.error(f"--rows {min(args.rows)}: a decode step has at least one row")
    batches: tuple[int, ...] = () if args.only == "prompts" else tuple(args.rows)
    path = args.out
    began = time.monotonic()
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    results |= {"shapes": {}, "chunked": {}, "convolution": {}}
    tasks = [*steps_of(batches), *(() if args.only == "decodes" else CHUNKS), *batches]
    with ProcessPoolExecutor(min(len(tasks), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        found = dict(zip(tasks, pool.map(first_run, tasks), strict=True))
    results["errors"] = {str(task): value for task, (value, _) in found.items()}
    wrong = [f"{task}: {value:.1e} {problem}" for task, (value, problem) in found.items() if not value < WORST]
    right = [task for task in tasks if found[task][0] < WORST]
    steps = [task for task in right if isinstance(task, Launch)]
    if steps:
        many = results["errors_of_150_rows"] = check_many(steps, 150)
        wrong += [f"150 rows, {name}: {value:.1e}" for name, value in many.items() if not value < WORST]
        steps = [launch for launch in steps if many[str(launch)] < WORST]
    keep(path, results)
    worst = max((found[task][0] for task in right), default=0.0)
    compiled = time.monotonic()
    print(f"{len(right)} of {len(tasks)} launches and projections are right, to {worst:.1e}; {compiled - began:.0f} s")
    missed = time_decodes(steps, batches, results, compiled + BUDGET_S, path)
    if args.only != "decodes":
        time_convolutions(results, path)
        time_prompts(
            [task for task in right if isinstance(task, triton_chunked.Launch)], arguments(1, seed=0), results, path
        )
    print(f"{time.monotonic() - began:.0f} s, {time.monotonic() - compiled:.0f} of them to time")
    if wrong or missed:
        sys.exit("\n".join([*(f"WRONG {each}" for each in wrong), *(f"out of time: {each}" for each in missed)]))


if __name__ == "__main__":
    main()
