"""Sparse MLA on a GPU: correctness of each kernel variant, then a sweep of launch sizes against floors and bars.

    PYTHONPATH=. python benchmarks/kernels/bench_sparse_mla.py OUT.json

Variants are compiled and compared with fp32 torch in worker processes first, which also fills Triton's cache. Times are
medians of replays of a graph whose calls rotate over input sets that are larger than the L2 cache together.

Predicted for 64 heads, 2,048 rows, 132 programs at a time, the kernel with roles: dense MLA, the same kernel, takes
2.4 us for a tile of 72 KB from memory or from the L2 cache, so 2.1 us with 64 KB of bf16 rows and 2.0 with quantised
ones, which shared memory bounds (2,200 cycles a tile to feed products and take rows in, unpacking beside it). Start to
end without tiles 10 us, a merge 2 to 6 us. So 78 / 75 us (bf16 / mxfp8) at batch 128, 50 / 46 at 64, 33 / 31 at 32;
2,048 prefill tokens 1.05 ms, 520 TFLOP/s. The pipelined kernel below 5 blocks of heads: 10 / 13 us at 1.

Before the shapes come the two launches of a call alone: runs without their merge, and both merges of parts that lie in
the L2 cache.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.kernels.results import keep, out_file
from sidestream.ops.kv_rows import KVRowLayout, kv_row_layout, pack_rows
from sidestream.ops.sparse_mla import torch_impl, triton_launch
from sidestream.ops.sparse_mla.triton_impl import MAX_SPLITS, sparse_mla
from sidestream.ops.sparse_mla.triton_launch import Launch, choose_launch, merge_runs, role_tiles

BYTES_PER_S, FLOPS_PER_S = 4.28e12, 790e12
SCALE, LATENT = 192**-0.5, 512
WORKERS = 16
ROTATED_BYTES = 160 << 20

BATCHES = (1, 8, 32, 64, 128)
BARS = {"mxfp8": (12, 16, 36, 55, 90), "bf16": (12, 18, 42, 65, 105), "fp8_ds_mla": (12, 18, 42, 65, 105)}
ROPES = {"mxfp8": 0, "bf16": 0, "fp8_ds_mla": 64}
SMALL = ((16, 32, 5, 4, False), (64, 64, 3, 8, True), (64, 32, 5, 8, True), (32, 64, 3, 8, True), (32, 32, 5, 4, False))
"""Sizes for few tokens or heads: block_h, block_n, stages, warps, parted."""
ALONE = tuple(itertools.product(("mxfp8", "bf16"), (1, 8, 32, 64)))
"""Row formats and batches whose two launches are timed apart."""


@dataclass(frozen=True)
class Shape:
    """``bar``: microseconds to beat, None where there is none."""

    layout: str
    rope: int
    tokens: int
    heads: int
    width: int
    bar: float | None


def shapes() -> list[Shape]:
    found = [
        Shape(name, ROPES[name], t, 64, 2048, bar) for name in BARS for t, bar in zip(BATCHES, BARS[name], strict=True)
    ]
    found += [Shape("mxfp8", 0, t, 64, 2051, None) for t in (1, 8, 64)]
    found += [Shape(name, ROPES[name], t, 64, 2048, None) for name in BARS for t in (2, 3, 4, 16)]
    found += [Shape(name, ROPES[name], 64, 128, 2048, 105) for name in BARS]
    found += [Shape("bf16", 0, t, 8, 2048, None) for t in (1, 64)]
    found += [
        Shape(name, ROPES[name], 2048, 64, 2048, 2048 * 64 * 2048 * 2 * (2 * 512 + ROPES[name]) / 430e6)
        for name in BARS
    ]
    return found


def layout_of(name: str, rope: int) -> KVRowLayout:
    return kv_row_layout(name, latent_dim=LATENT, rope_dim=rope, model_dtype=torch.bfloat16)


def pool_of(layout: KVRowLayout, rows: int) -> torch.Tensor:
    pool = torch.empty(rows, layout.row_elems, dtype=layout.dtype, device="cuda")
    for first in range(0, rows, 1 << 17):
        count = min(1 << 17, rows - first)
        rope = torch.randn(count, layout.rope_dim, device="cuda") if layout.rope_dim else None
        pool[first : first + count] = pack_rows(torch.randn(count, LATENT, device="cuda"), rope, layout)
    return pool


def rows_of(tokens: int, width: int, pool_rows: int) -> torch.Tensor:
    """[tokens, width] distinct ascending rows of a pool, strata of equal size."""
    step = pool_rows // width
    base = torch.arange(width, device="cuda") * step
    return base + torch.randint(0, step, (tokens, width), device="cuda")


def variants(shape: Shape) -> list[Launch]:
    """The table's choice, and what else may pay: other tiles where the format has them, the kernel with roles or
    small blocks for few tokens or heads."""
    layout = layout_of(shape.layout, shape.rope)
    chosen = choose_launch(shape.tokens, shape.heads, shape.width, layout, MAX_SPLITS)
    found = [chosen]
    if shape.heads == 64 and shape.tokens <= 8:
        splits = min(-(-132 // shape.tokens) - 1, 32)
        roles = Launch(splits, 64, 64, 1, 8, False, roles=True, in_threads=True)
        found += [replace(roles, block_n=tile) for tile in role_tiles(layout)]
    if chosen.roles:
        found += [replace(chosen, block_n=tile) for tile in role_tiles(layout)]
    if shape.tokens <= 8 or shape.heads < 32:
        for block_h, block_n, stages, warps, parted in SMALL:
            most = min(MAX_SPLITS, -(-shape.width // block_n))
            splits = min(132 // shape.tokens if block_h == 64 else 64 // shape.tokens, most)
            found.append(Launch(splits, block_h, block_n, stages, warps, parted))
    if shape.heads == 64 and shape.tokens == 1:
        found += [Launch(64, 64, 32, stages, 8, parted=True) for stages in (5, 2)]
        found += [Launch(64, block_h, 32, stages, 4, parted=False) for block_h in (16, 32) for stages in (2, 5)]
    if shape.layout == "fp8_ds_mla" and shape.tokens in (2, 3, 4):
        found += [Launch(32, 64, 64, 1, 8, False, roles=True, in_threads=True)]
    return list(dict.fromkeys(found))


def check(job: tuple[str, int, Launch]) -> tuple[tuple[str, int, Launch], float, str]:
    """Relative error of a variant on ragged lengths, with NaN in every row that is not selected; compiles it."""
    name, rope, launch = job
    try:
        torch.manual_seed(1)
        layout, counts = layout_of(name, rope), [2048, 0, 1, 700] * 2
        pool = torch.full((9000, layout.row_bytes), 0xFF, dtype=torch.uint8, device="cuda").view(layout.dtype)
        rows = rows_of(8, 2048, 9000)
        for t, count in enumerate(counts):
            rows[t, count:] = -1
        used = rows[rows >= 0].unique()
        keys = torch.randn(len(used), rope, device="cuda") if rope else None
        pool[used] = pack_rows(torch.randn(len(used), LATENT, device="cuda"), keys, layout)
        heads = 64 if launch.block_h == 64 else launch.block_h
        q = torch.randn(8, heads, LATENT + rope, device="cuda").bfloat16()
        given = torch.tensor(counts, dtype=torch.int32, device="cuda")
        out, lse = sparse_mla(q, pool, rows, counts=given, scale=SCALE, layout=layout, launch=launch)
        want, want_lse = torch_impl.sparse_mla(q.float(), pool, rows, counts=given, scale=SCALE, layout=layout)
        assert lse is not None
        assert want_lse is not None
        assert torch.equal(lse.isinf(), want_lse.isinf())
        worst = (out.float() - want).norm(dim=2) / want.norm(dim=2).clamp_min(1e-30)
        error = max(worst.max().item(), (lse - want_lse)[lse.isfinite()].abs().max().item())
        return job, error if out.isfinite().all() else float("nan"), ""
    except Exception as failure:  # noqa: BLE001  a variant that does not fit or compile is a result
        return job, float("nan"), f"{type(failure).__name__}: {str(failure)[:150]}"


def time_us(shape: Shape, launch: Launch, pools: dict[tuple[str, int], torch.Tensor]) -> float:
    """Median microseconds a call: replays of a graph of at least 20 calls."""
    layout, pool = layout_of(shape.layout, shape.rope), pools[shape.layout, shape.rope]
    sets = max(2, min(96, -(-ROTATED_BYTES // (shape.tokens * shape.width * layout.row_bytes))))
    sets = sets if shape.tokens < 1000 else 1
    calls = max(20, sets) if shape.tokens < 1000 else 3
    inputs = [
        (
            torch.randn(shape.tokens, shape.heads, LATENT + shape.rope, device="cuda").bfloat16(),
            rows_of(shape.tokens, shape.width, pool.shape[0] if shape.tokens < 1000 else 32_768),
        )
        for _ in range(sets)
    ]
    counts = torch.full((shape.tokens,), shape.width, dtype=torch.int32, device="cuda")

    def call(i: int) -> None:
        q, rows = inputs[i % sets]
        sparse_mla(q, pool, rows, counts=counts, scale=SCALE, layout=layout, launch=launch)

    return replayed_us(call, calls)


def replayed_us(call: Callable[[int], object], calls: int = 20) -> float:
    """Median microseconds of calls 0, 1, ..., in replays of a graph of them."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return sorted(times)[len(times) // 2]


def alone(name: str, tokens: int, pools: dict[tuple[str, int], torch.Tensor]) -> dict[str, Any]:
    """Microseconds of each launch of a call of 64 heads."""
    shape = Shape(name, ROPES[name], tokens, 64, 2048, None)
    layout = layout_of(name, ROPES[name])
    chosen = choose_launch(tokens, 64, 2048, layout, MAX_SPLITS)
    roles = replace(chosen, block_h=64, block_n=min(role_tiles(layout)), roles=True, early=True)
    found: dict[str, Any] = {"layout": name, "tokens": tokens, "splits": chosen.splits}
    with patch.object(triton_launch, "merge_runs"):
        for label, launch in (("runs", chosen), ("runs, roles", roles)):
            found[label] = time_us(shape, launch, pools)
    parts = torch.randn(tokens, chosen.splits, 64, LATENT, device="cuda").bfloat16()
    part_lse = torch.randn(tokens, chosen.splits, 64, device="cuda")
    out, lse = torch.empty_like(parts[:, 0]), torch.empty_like(part_lse[:, 0])
    for label, in_threads in (("merge", False), ("merge in threads", True)):

        def merge(_: int, in_threads: bool = in_threads) -> None:
            how = replace(chosen, in_threads=in_threads)
            merge_runs(parts, part_lse, out, lse, sparing=False, launch=how, pdl=False)

        found[label] = replayed_us(merge)
    return found


def floor_us(shape: Shape) -> float:
    per_row = 2 * shape.tokens * shape.heads * shape.width * (2 * LATENT + shape.rope)
    touched = shape.tokens * shape.width * layout_of(shape.layout, shape.rope).row_bytes
    return max(touched / BYTES_PER_S if shape.tokens < 1000 else 0.0, per_row / FLOPS_PER_S) * 1e6


def key_of(shape: Shape, launch: Launch) -> tuple[Any, ...]:
    """Equal for launches whose runs are compiled from the same code."""
    return shape.layout, shape.rope, launch.splits > 1, replace(launch, splits=1, in_threads=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=out_file)
    parser.add_argument("--only", nargs="+", choices=BARS, default=tuple(BARS), help="formats of rows")
    args = parser.parse_args()
    path, began = args.out, time.time()
    plan = {shape: variants(shape) for shape in shapes() if shape.layout in args.only}
    jobs: dict[tuple[Any, ...], tuple[str, int, Launch]] = {}
    for shape, launch in itertools.chain.from_iterable(((s, one) for one in many) for s, many in plan.items()):
        # One check of each kernel of runs; that of a call which merges within threads does for the other merge too.
        if launch.in_threads or key_of(shape, launch) not in jobs:
            tried = replace(launch, splits=launch.splits if launch.in_threads else min(launch.splits, 3))
            jobs[key_of(shape, launch)] = shape.layout, shape.rope, tried
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as workers:
        checked = list(workers.map(check, jobs.values()))
    wrong = {}
    for (key, _), (job, error, text) in zip(jobs.items(), checked, strict=True):
        if not error <= 2**-6:
            wrong[key] = text or f"error {error}"
            print(f"WRONG {job[0]} {job[2]}: {wrong[key]}")
    print(f"checked {len(jobs)} variants in {time.time() - began:.0f} s, {len(wrong)} wrong")
    pools = {(name, rope): pool_of(layout_of(name, rope), 1 << 20) for name, rope in ROPES.items()}
    results: list[dict[str, Any]] = []
    found = {
        "wrong": {str(key): text for key, text in wrong.items()},
        "errors": [{"variant": str(job), "error": error} for job, error, _ in checked],
        "times": results,
    }
    found["alone"] = [alone(name, tokens, pools) for name, tokens in ALONE if name in args.only]
    for part in found["alone"]:
        print(
            ", ".join(f"{key} {value:.1f}" if isinstance(value, float) else str(value) for key, value in part.items())
        )
    for shape, launches in plan.items():
        timed = []
        for launch in launches:
            if key_of(shape, launch) not in wrong:
                timed.append((time_us(shape, launch, pools), launch))
        ranked = sorted(timed, key=lambda pair: pair[0])
        results += [{**asdict(shape), "floor": floor_us(shape), "us": us, **asdict(one)} for us, one in ranked]
        keep(path, found)
        bar = "-" if shape.bar is None else f"{shape.bar:.0f}"
        default = next((us for us, one in timed if one == launches[0]), float("nan"))
        print(f"{shape.layout} p={shape.rope} T={shape.tokens} H={shape.heads} W={shape.width}:", end=" ")
        print(f"floor {floor_us(shape):.1f}, bar {bar}, default {default:.1f} us", flush=True)
        for us, one in ranked[:7]:
            print(
                f"    {us:8.1f} us  splits={one.splits} h={one.block_h} n={one.block_n} stages={one.stages} "
                f"warps={one.warps} parted={one.parted} roles={one.roles} pdl={one.pdl} early={one.early} "
                f"in_threads={one.in_threads}"
            )
    print(f"{time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main()
