"""Experts at the sizes of prompts on a GPU: products by every warp and by warps with roles, kernel by kernel.

    PYTHONPATH=. python benchmarks/kernels/bench_moe_prompts.py OUT.json [--tokens 1024 8192]

Each is checked against fp32, then timed in graphs as ``bench_moe.py`` does; ``every warp``, what is in use where means
are small, is timed before and after the others, since a device under load slows down. Last comes the library's dense
product of as many rows, one call for gate and up and one for down: what a device as warm can reach. Kernels of one call
are printed in the order of their start.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from functools import partial
from multiprocessing import get_context

import torch

from benchmarks.kernels.bench_moe import (
    FLOP_PER_US,
    HIDDEN,
    INNER,
    LIMIT,
    TOP_K,
    Report,
    Shape,
    choices,
    draw,
    error_of,
    in_fp32,
)
from benchmarks.kernels.results import keep, out_file
from sidestream.ops.moe import triton_grouped
from sidestream.ops.moe.triton_tiles import ROLES, ExpertTiles, expert_tiles

EXPERTS = 64


def variants(tokens: int) -> dict[str, ExpertTiles]:
    every = expert_tiles(tokens, TOP_K, EXPERTS)
    return {"every warp": every, "roles": ROLES, "roles again": ROLES, "every warp again": every}


def kernel_times(call: partial[torch.Tensor]) -> str:
    """us of each kernel of one call."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    return ", ".join(f"{e.name[:20]} {e.device_time:.0f}" for e in sorted(events, key=lambda e: e.time_range.start))


def try_one(tiles: ExpertTiles) -> None:
    """In a process of its own: fill Triton's cache on disk, and launch once. One expert and a shared one are enough."""
    x, w13, w2 = draw(1100, HIDDEN), draw(2, 2 * INNER, HIDDEN), draw(2, HIDDEN, INNER)
    ids, weights = torch.zeros(1100, TOP_K, dtype=torch.int64, device="cuda"), torch.ones(1100, TOP_K, device="cuda")
    triton_grouped.experts(x, w13, w2, weights=weights, ids=ids, num_shared=1, swiglu_limit=LIMIT, tiles=tiles)
    torch.cuda.synchronize()


def that_run(tiles: Iterable[ExpertTiles], *, seconds: float) -> set[ExpertTiles]:
    """Those that compile and end in time; a kernel that waits for ever is ended with its process."""
    spawn = get_context("spawn")
    tried = {one: spawn.Process(target=try_one, args=(one,)) for one in tiles}
    for process in tried.values():
        process.start()
    deadline = time.monotonic() + seconds
    for process in tried.values():
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    return {one for one, process in tried.items() if process.exitcode == 0}


def bench_library(report: Report, shape: Shape, w13: torch.Tensor, w2: torch.Tensor, rows: int) -> None:
    """Dense products of ``rows`` rows by the weights of one expert: the same operations, without anything between."""
    x, hidden = draw(rows, HIDDEN), draw(rows, INNER)

    def multiply(i: int) -> torch.Tensor:
        torch.nn.functional.linear(x, w13[i])
        return torch.nn.functional.linear(hidden, w2[i])

    report.add(shape, "library, dense", multiply, lambda: 0.0)
    print(f"{shape.name} library, dense: {report.rows[-1].get('us')}, {kernel_times(partial(multiply, 0))}", flush=True)


def bench(report: Report, w13: torch.Tensor, w2: torch.Tensor, tokens: int, running: set[ExpertTiles]) -> None:
    sets = choices(tokens, EXPERTS, 2)
    shape = Shape(f"experts {tokens}", 6 * HIDDEN * INNER * tokens * (TOP_K + 1) / FLOP_PER_US, 2, 4)
    want = in_fp32(sets[0][0], w13, w2, *sets[0][1:])

    def through(i: int, tiles: ExpertTiles) -> torch.Tensor:
        x, weights, ids = sets[i]
        return triton_grouped.experts(
            x, w13, w2, weights=weights, ids=ids, num_shared=1, swiglu_limit=LIMIT, tiles=tiles
        )

    for name, tiles in variants(tokens).items():
        if tiles not in running:
            print(f"{tokens} {name}: does not compile, or does not end")
            continue
        call = partial(through, tiles=tiles)
        report.add(shape, name, call, partial(lambda call: error_of(call(0), want), call))
        row = report.rows[-1]
        if "us" in row:
            row["kernels"] = kernel_times(partial(call, 0))
            first = call(0)
            row["repeats"] = all(torch.equal(call(0), first) for _ in range(5))
        print(f"{tokens} {name}: { ({key: row[key] for key in row if key not in ('shape', 'variant')}) }", flush=True)
    bench_library(report, shape, w13, w2, tokens * (TOP_K + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=out_file)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 8192])
    parser.add_argument("--limit", type=float, default=30.0, help="seconds to compile and to launch each once")
    options = parser.parse_args()
    torch.manual_seed(1)
    report, began = Report(out=options.out), time.monotonic()
    tiles = dict.fromkeys(tiles for tokens in options.tokens for tiles in variants(tokens).values())
    running = that_run(tiles, seconds=options.limit)
    print(f"{len(running)} of {len(tiles)} run, after {time.monotonic() - began:.0f} s", flush=True)
    with torch.inference_mode():
        w13 = draw(EXPERTS + 1, 2 * INNER, HIDDEN, spread=HIDDEN**-0.5)
        w2 = draw(EXPERTS + 1, HIDDEN, INNER, spread=INNER**-0.5)
        for tokens in options.tokens:
            bench(report, w13, w2, tokens, running)
    made = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": report.rows}
    keep(options.out, made)
    for row in report.rows:
        print(f"{row['shape']:>14} {row['variant']:<28} {row.get('us', row.get('fault', 'wrong'))}")
    print(f"{made['device']}, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
