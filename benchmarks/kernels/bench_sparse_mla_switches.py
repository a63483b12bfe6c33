"""Sparse MLA on a GPU: what tables leave off, each and together, beside what they choose.

    PYTHONPATH=. python benchmarks/kernels/bench_sparse_mla_switches.py OUT.json

Every variant is compiled and compared with fp32 torch in worker processes first. Graphs of all variants of a shape then
run in turn, over the same inputs, and each of their calls must find what the table's finds. The last lines give each
switch's ratio to the table: the geometric mean over the shapes that it changes, and the worst.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.bench_sparse_mla import (
    LATENT,
    ROPES,
    ROTATED_BYTES,
    SCALE,
    WORKERS,
    Shape,
    check,
    layout_of,
    pool_of,
    rows_of,
)
from benchmarks.kernels.results import keep, only_file
from sidestream.ops.sparse_mla.triton_impl import MAX_SPLITS, sparse_mla
from sidestream.ops.sparse_mla.triton_launch import Launch, choose_launch

BATCHES = {"mxfp8": (1, 8, 32, 64, 128), "bf16": (1, 8, 32, 64, 128), "fp8_ds_mla": (8, 64, 128)}
OTHER_SPLITS = {64: (3, 4), 32: (6, 8)}
ROUNDS = 15
MOST_MEAN, MOST_WORST = 0.985, 1.02


def variants(shape: Shape) -> dict[str, Launch]:
    """The table's choice as ``table``, and each switch that changes it."""
    table = choose_launch(shape.tokens, 64, shape.width, layout_of(shape.layout, shape.rope), MAX_SPLITS)
    found = {"table": table, "chained": replace(table, chained=True)}
    if table.roles:
        switch = "ahead" if table.block_n == 32 else "ahead_long"
        if shape.layout != "fp8_ds_mla" or switch == "ahead":
            found[switch] = replace(table, block_n=32, ahead=True)
        packed = shape.layout != "bf16"
        if packed:
            found["unfenced"] = replace(table, fenced=False)
        if packed or table.block_n == 32:
            found["all"] = replace(table, chained=True, ahead=table.block_n == 32, fenced=not packed)
    if table.splits > 1 and shape.tokens == 4:
        found["barriers"] = replace(table, in_threads=False)
    for splits in OTHER_SPLITS.get(shape.tokens, ()):
        found[f"{splits} runs"] = replace(table, splits=splits)
    if table.roles and shape.tokens == 8:
        found["64 rows"] = replace(table, block_n=64)
    return found


def key_of(shape: Shape, launch: Launch) -> tuple[Any, ...]:
    """Equal for launches whose runs are compiled from the same code."""
    return shape.layout, shape.rope, launch.splits > 1, replace(launch, splits=1)


def time_shape(
    shape: Shape, launches: dict[str, Launch], pool: torch.Tensor
) -> tuple[dict[str, float], dict[str, float]]:
    """Median microseconds a call, and the largest relative difference of a call's result from the table's."""
    layout = layout_of(shape.layout, shape.rope)
    sets = max(4, min(48, -(-ROTATED_BYTES // (shape.tokens * shape.width * layout.row_bytes))))
    counts = torch.full((shape.tokens,), shape.width, dtype=torch.int32, device="cuda")
    inputs = [
        (
            torch.randn(shape.tokens, 64, LATENT + shape.rope, device="cuda").bfloat16(),
            rows_of(shape.tokens, shape.width, pool.shape[0]),
        )
        for _ in range(sets)
    ]
    calls = max(20, sets)
    graphs, outs = {}, {}
    for name, launch in launches.items():
        how: dict[str, Any] = {"counts": counts, "scale": SCALE, "layout": layout, "launch": launch}
        sparse_mla(inputs[0][0], pool, inputs[0][1], **how)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            found = [sparse_mla(*_with_pool(inputs[i % sets], pool), **how)[0] for i in range(calls)]
        outs[name] = found
    times: dict[str, list[float]] = {name: [] for name in launches}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1000 / calls)
    apart = {}
    for name, found in outs.items():
        pairs = zip(found, outs["table"], strict=True)
        worst = [((a.float() - b.float()).norm(dim=2) / b.float().norm(dim=2)).max() for a, b in pairs]
        apart[name] = torch.stack(worst).max().item()
    return {name: sorted(many)[ROUNDS // 2] for name, many in times.items()}, apart


def _with_pool(
    given: tuple[torch.Tensor, torch.Tensor], pool: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return given[0], pool, given[1]


def decide(results: list[dict[str, Any]], wrong: list[str]) -> dict[str, dict[str, Any]]:
    """Of each switch: mean and worst ratio to the table, whether it was right everywhere, whether it pays."""
    found = {}
    for name in ("chained", "ahead", "ahead_long", "unfenced", "all"):
        ratios = [result["us"][name] / result["us"]["table"] for result in results if name in result["us"]]
        right = bool(ratios) and name not in wrong
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
        worst = max(ratios, default=math.nan)
        pays = right and mean <= MOST_MEAN and worst <= MOST_WORST
        found[name] = {"mean": mean, "worst": worst, "right": right, "pays": pays}
    return found


def main(path: Path) -> None:
    began = time.time()
    shapes = [Shape(name, ROPES[name], tokens, 64, 2048, None) for name, many in BATCHES.items() for tokens in many]
    shapes.append(Shape("mxfp8", 0, 4, 64, 2048, None))
    plan = {shape: variants(shape) for shape in shapes}
    each = [(shape, name, launch) for shape, many in plan.items() for name, launch in many.items()]
    jobs = {key_of(shape, launch): (shape.layout, shape.rope, launch) for shape, _, launch in each}
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as workers:
        checked = dict(zip(jobs, workers.map(check, jobs.values()), strict=True))
    failed = {key: text or f"error {error}" for key, (_, error, text) in checked.items() if not error <= 2**-6}
    for key, text in failed.items():
        print(f"WRONG {key}: {text}")
    print(f"checked {len(jobs)} variants in {time.time() - began:.0f} s, {len(failed)} wrong", flush=True)
    wrong = [name for shape, name, launch in each if key_of(shape, launch) in failed]
    pools = {name: pool_of(layout_of(name, rope), 1 << 18) for name, rope in ROPES.items()}
    results: list[dict[str, Any]] = []
    for shape, launches in plan.items():
        good = {name: launch for name, launch in launches.items() if key_of(shape, launch) not in failed}
        if "table" not in good:
            wrong += launches
            continue
        us, apart = time_shape(shape, good, pools[shape.layout])
        wrong += [name for name, one in apart.items() if not one <= 2**-6]
        line = ", ".join(f"{name} {one:.1f}" for name, one in us.items())
        print(f"{shape.layout} T={shape.tokens}: {line}; apart {max(apart.values()):.1e}", flush=True)
        chosen = {name: asdict(launch) for name, launch in good.items()}
        results.append({**asdict(shape), "us": us, "apart": apart, "launches": chosen})
        keep(path, {"times": results})
    decisions = decide(results, wrong)
    keep(path, {"times": results, "decisions": decisions, "wrong": {str(key): text for key, text in failed.items()}})
    print(f"{time.time() - began:.0f} s in all")
    for name, one in decisions.items():
        print(f"DECIDE {name} {one['mean']:.3f} {'right' if one['right'] else 'WRONG'} worst {one['worst']:.3f}")


if __name__ == "__main__":
    main(only_file(__doc__))
