"""Linear layers of few rows on a GPU: each launch checked, then timed in graphs, beside the library and the floor.

    PYTHONPATH=. python benchmarks/kernels/bench_linear.py OUT.json [--rows 1 8] [--tables]

The shapes are those of GLM-5.3-Flash. A graph calls one product after the other with weights that rotate through more
copies than the L2 cache holds. Floor: the weight once over 4.28 TB/s; the bar is 4.1 TB/s.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import torch

from benchmarks.kernels.bench_moe import BYTES_PER_US, Report, Shape, draw, error_of
from benchmarks.kernels.results import keep, out_file
from sidestream.ops.linear import reference, torch_impl, triton_linear, triton_stream
from sidestream.ops.linear.launches import Launch, Stream, launch_for, stream_for

SHAPES = {
    "KDA in": (24896, 4096),
    "KDA out": (4096, 8192),
    "MLA in": (2336, 4096),
    "MLA query": (20480, 1536),
    "MLA out": (4096, 16384),
    "gate and up": (24576, 4096),
    "down": (4096, 12288),
    "head": (32768, 4096),
}
"""Name to (N, K)."""
ROWS = (1, 2, 4, 8, 16, 32, 64)
ROTATED_BYTES = 300e6

TILES = {
    1: [(2, 4096, 8, 1), (2, 2048, 4, 1), (4, 1024, 4, 1), (4, 2048, 8, 1), (8, 512, 4, 1), (8, 512, 4, 3),
        (1, 4096, 4, 1), (4, 512, 2, 1), (16, 512, 8, 2)],
    16: [(64, 128, 4, 4, 1), (64, 128, 4, 4, 4), (32, 128, 4, 4, 1), (32, 128, 4, 4, 2), (32, 128, 4, 4, 4),
         (32, 256, 4, 3, 1), (32, 256, 4, 3, 4), (64, 256, 4, 3, 8), (128, 64, 4, 4, 4), (16, 256, 4, 4, 1)],
    32: [(64, 128, 4, 4, 1), (32, 128, 4, 4, 1), (64, 128, 4, 4, 4), (32, 128, 4, 4, 4), (128, 64, 4, 4, 4)],
    64: [(128, 64, 4, 4, 1), (64, 64, 4, 5, 1), (64, 128, 4, 4, 2), (128, 64, 4, 4, 4), (64, 128, 4, 3, 4),
         (128, 128, 8, 3, 4), (32, 128, 4, 4, 1)],
}  # fmt: skip
"""By rows of a program: (columns, depth, warps, stages, splits)."""


def launches(rows: int) -> list[Launch]:
    """The first two without an early start, too."""
    height = 1 if rows == 1 else max(16, 1 << (rows - 1).bit_length())
    made = [Launch(height, *tiles) for tiles in TILES[height]]
    return made + [replace(launch, early=False) for launch in made[:2]]


def streams(rows: int, N: int, K: int, *, sweep: bool) -> list[Stream]:
    """The one in use; in a sweep all that give 64 to 132 multiprocessors a program."""
    table = stream_for(rows, N, K)
    if not sweep or rows == 1:
        return [] if table is None else [table]
    height, steps = max(16, 1 << (rows - 1).bit_length()), K // 64
    cuts = [(n, splits) for n in range(1, 5) for splits in range(1, 9) if steps % splits == 0]
    return [Stream(height, n, steps // s, s) for n, s in cuts if 64 <= -(-N // (64 * n)) * s <= 132]


def bench(report: Report, name: str, rows: int, *, sweep: bool) -> None:
    N, K = SHAPES[name]
    sets = max(2, int(ROTATED_BYTES // (2 * N * K)) + 1)
    weights = [draw(N, K, spread=K**-0.5) for _ in range(sets)]
    x = [draw(rows, K) for _ in range(sets)]
    shape = Shape(f"{name} x {rows}", 2 * N * K / BYTES_PER_US, sets, max(sets, 8) // sets * sets)
    want = reference.linear(x[0], weights[0], None)

    def measure(label: str, function: object) -> None:
        report.add(shape, label, lambda i: function(x[i], weights[i], None),  # type: ignore[operator]
                   lambda: error_of(function(x[0], weights[0], None), want))  # type: ignore[operator]  # fmt: skip

    measure("torch", torch_impl.linear)
    table = launch_for(rows, N, K)
    if isinstance(table, Launch):
        measure("table", partial(triton_linear.linear, launch=table))
    for stream in streams(rows, N, K, sweep=sweep):
        label = f"stream: {stream.groups} groups, {stream.stages} stages, {stream.splits} splits"
        measure(
            label + (" (table)" if stream == stream_for(rows, N, K) else ""),
            partial(triton_stream.linear, launch=stream),
        )
    for launch in launches(rows) if sweep else ():
        measure(short(launch), partial(triton_linear.linear, launch=launch))


def short(launch: Launch) -> str:
    tiles = f"{launch.rows}: {launch.columns} x {launch.depth}, {launch.warps} warps, {launch.stages} stages"
    return f"{tiles}, {launch.splits} splits{', early' if launch.early else ''}"


Job = tuple[int, int, Launch | Stream]


def jobs(rows: Sequence[int], *, sweep: bool) -> Iterator[Job]:
    for count in rows:
        for N, K in SHAPES.values():
            table = launch_for(count, N, K)
            tried = [
                *([table] if table is not None else []),
                *streams(count, N, K, sweep=sweep),
                *(launches(count) if sweep else ()),
            ]
            for launch in tried:
                yield count, K if count == 1 or isinstance(launch, Stream) else 16384, launch


def compile_one(job: Job) -> None:
    """In a process of its own: fill Triton's cache on disk."""
    rows, K, launch = job
    run = partial(triton_stream.linear if isinstance(launch, Stream) else triton_linear.linear, launch=launch)
    try:
        run(draw(rows, K), draw(256, K), None)
        torch.cuda.synchronize()
    except Exception as fault:  # noqa: BLE001  # reported when the variant is timed
        print(f"{launch}: {type(fault).__name__}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=out_file)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--tables", action="store_true", help="sweep nothing")
    options = parser.parse_args()
    torch.manual_seed(1)
    report, began = Report(out=options.out), time.monotonic()
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, dict.fromkeys(jobs(options.rows, sweep=not options.tables))))
    print(f"compiled after {time.monotonic() - began:.0f} s")
    with torch.inference_mode():
        for rows in options.rows:
            for name in SHAPES:
                bench(report, name, rows, sweep=not options.tables)
    report.show()
    seconds = round(time.monotonic() - began, 1)
    made = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "seconds": seconds, "rows": report.rows}
    keep(options.out, made)
    print(f"{made['device']}, {seconds} s")


if __name__ == "__main__":
    main()
