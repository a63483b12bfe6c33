"""Router, experts, SwiGLU and rotation on a GPU: each variant checked, then timed in graphs, beside its floor.

    PYTHONPATH=. python benchmarks/kernels/bench_moe.py OUT.json [--only experts] [--tables]

A time is the median over replays of a graph that calls the operator with several input sets in turn, divided by the
calls. Weights are far larger than the L2 cache, or rotate through more copies than it holds. Floor: bytes that must be
touched once over 4.28 TB/s, or operations over 790 TFLOP/s; the bar is 1.1 times that. Launch parameters are swept:
gate and up first, then down beside the best of them. ``table`` is what the launcher takes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.results import keep, out_file
from sidestream.ops.moe import (
    device_impl,
    reference,
    torch_impl,
    triton_grouped,
    triton_one_token,
    triton_route,
    triton_swiglu,
)
from sidestream.ops.moe.triton_tiles import ExpertTiles, RouterTiles, Tiles, expert_tiles, router_tiles
from sidestream.ops.rope import torch_impl as rope_torch
from sidestream.ops.rope import triton_rope

HIDDEN, INNER, TOP_K, LIMIT = 4096, 2048, 8, 10.0
BYTES_PER_US, FLOP_PER_US = 4.28e6, 790e6
FP32_FLOP_PER_US = 60e6
EXPERT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 1024, 8192)
ROUTER_TOKENS = (1, 4, 8, 16, 64, 256, 8192)
ROUTED = (64, 288)
"""Numbers of experts; the first is swept."""
CHOICE: dict[str, Any] = {"top_k": TOP_K, "num_groups": 1, "topk_groups": 1, "norm_topk_prob": True, "scale": 2.5}
EXPERT_BYTES = 3 * HIDDEN * INNER * 2

UP_1 = [(8, 512, 4, 1), (4, 1024, 4, 1), (4, 512, 4, 1), (16, 256, 4, 1), (8, 1024, 8, 1), (8, 512, 4, 3)]
UP_1 += [(16, 512, 8, 3), (8, 512, 4, 4), (8, 256, 2, 1)]
DOWN_1 = [*UP_1, (16, 512, 4, 3), (4, 2048, 4, 1), (4, 512, 2, 1)]
UP = {
    16: [(32, 128, 4, 4), (16, 256, 4, 3), (64, 128, 4, 3), (32, 256, 4, 3), (32, 64, 4, 5), (64, 64, 4, 4)],
    32: [(64, 128, 4, 3), (32, 128, 4, 4), (64, 64, 4, 4)],
    64: [(64, 64, 4, 4), (128, 64, 8, 3), (64, 128, 4, 3)],
    128: [(128, 64, 8, 3), (64, 64, 4, 3), (128, 64, 8, 4), (64, 64, 8, 4)],
}
DOWN = {
    16: [(64, 128, 4, 4), (32, 256, 4, 3), (64, 256, 4, 3), (128, 64, 4, 4), (32, 128, 4, 4)],
    32: [(64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 4, 3)],
    64: [(128, 64, 4, 4), (256, 64, 8, 3), (128, 128, 8, 3)],
    128: [(256, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 4), (256, 64, 8, 4)],
}
PLAIN_16, ENGINE_16 = (16, False), (16, True)
BLOCKS = {
    4: (PLAIN_16, ENGINE_16),
    16: (PLAIN_16, ENGINE_16),
    64: (PLAIN_16, ENGINE_16, (32, False)),
    128: (ENGINE_16, (32, False), (32, True)),
    512: ((64, False), (64, True), (128, True)),
    1024: ((64, True), (128, False), (128, True)),
    8192: ((128, False), (128, True)),
}
"""Tokens to the (rows, described) that are tried; other numbers of tokens take the table's alone."""
LANES = [RouterTiles(r, e, d, s, 4, 1, dot=False) for r, e, d, s in ((1, 4, 512, 4), (1, 2, 1024, 4), (1, 2, 512, 8))]
FEW_LANES = [
    RouterTiles(r, e, d, s, 4, 1, dot=False) for r, e, d, s in ((4, 4, 256, 4), (8, 4, 128, 8), (16, 4, 64, 8))
]
DOTS = {
    64: [(64, 16, 64, 16, 4), (64, 16, 128, 8, 4), (64, 32, 64, 16, 4), (16, 16, 128, 8, 4), (32, 16, 64, 16, 4),
         (64, 16, 64, 32, 4)],
    256: [(64, 32, 64, 8, 4), (128, 32, 64, 8, 8), (64, 64, 64, 8, 4), (64, 16, 64, 16, 4), (64, 16, 64, 8, 4)],
    8192: [(128, 64, 64, 4, 8), (128, 64, 64, 8, 8), (64, 64, 64, 4, 4), (128, 64, 32, 4, 8), (128, 32, 64, 4, 4),
           (128, 64, 64, 2, 8)],
}  # fmt: skip
"""Tokens to (rows, experts, depth, splits, warps)."""


@dataclass(frozen=True)
class Shape:
    """``floor``: us. ``calls``: one to each input set, as often as the graph needs."""

    name: str
    floor: float
    sets: int
    calls: int


@dataclass
class Report:
    """Rows of a table, written to ``out`` after each."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    out: Path | None = None

    def add(self, shape: Shape, variant: str, run: Callable[[int], Any], check: Callable[[], float]) -> float:
        """Time in us; infinite for a variant that fails, is wrong, or runs out of shared memory."""
        row: dict[str, Any] = {"shape": shape.name, "variant": variant, "floor_us": round(shape.floor, 2)}
        try:
            error = check()
            row["relative_error"] = error
            us = time_of(run, shape) if error < 1e-2 else float("inf")
        except Exception as fault:  # noqa: BLE001  # a variant that cannot be launched is a result
            row["fault"], us = f"{type(fault).__name__}: {str(fault)[:120]}", float("inf")
        row |= {"us": round(us, 2), "over_floor": round(us / shape.floor, 3)} if us < float("inf") else {}
        self.rows.append(row)
        keep(self.out, {"rows": self.rows})
        return us

    def show(self) -> None:
        for name in dict.fromkeys(row["shape"] for row in self.rows):
            own = sorted(
                (row for row in self.rows if row["shape"] == name), key=lambda row: row.get("us", float("inf"))
            )
            print(f"{name}: floor {own[0]['floor_us']} us, bar {1.1 * own[0]['floor_us']:.2f}")
            shown = own[:4] + [
                row for row in own[4:] if row["variant"] in ("table", "torch") or row["us"] == float("inf")
            ]
            for row in shown:
                note = row.get("fault") or f"error {row['relative_error']:.1e}"
                us, over = row.get("us", float("inf")), row.get("over_floor", float("inf"))
                print(f"    {us:9.2f} us  {over:7.3f} x floor  {row['variant']}  ({note})")


def time_of(run: Callable[[int], Any], shape: Shape) -> float:
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(shape.calls):
            run(call % shape.sets)
    for _ in range(2):
        graph.replay()
    times = []
    began = time.monotonic()
    while len(times) < 30 and (len(times) < 5 or time.monotonic() - began < 0.06):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / shape.calls)
    return statistics.median(times)


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||; NaN counts as wrong."""
    error = float((got.double() - want.double()).norm() / want.double().norm())
    return error if error == error else float("inf")


def draw(*shape: int, spread: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, spread)


def choices(tokens: int, num_experts: int, sets: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(x, weights, ids) of each input set."""
    made = []
    for _ in range(sets):
        ids = torch.rand(tokens, num_experts, device="cuda").argsort(dim=1)[:, :TOP_K].contiguous()
        weights = torch.rand(tokens, TOP_K, device="cuda")
        made.append((draw(tokens, HIDDEN), weights * 2.5 / weights.sum(dim=1, keepdim=True), ids))
    return made


def in_fp32(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    total = torch.zeros(x.shape, device="cuda")
    for expert in range(w13.shape[0]):
        shared = expert == w13.shape[0] - 1
        own = torch.arange(len(x), device="cuda") if shared else (ids == expert).any(dim=1).nonzero().flatten()
        weight = torch.ones_like(own) if shared else torch.where(ids == expert, weights, 0.0).sum(dim=1)[own]
        if own.numel():
            hidden = reference.swiglu(x[own].float() @ w13[expert].float().T, limit=LIMIT).bfloat16().float()
            total[own] += weight[:, None] * (hidden @ w2[expert].float().T)
    return total


def swept(tokens: int) -> list[tuple[int, bool, list[Tiles], list[Tiles]]]:
    """(rows of a block, described, tiles of gate and up, tiles of down)."""
    if tokens == 1:
        return [(1, False, [Tiles(*t) for t in UP_1], [Tiles(*t) for t in DOWN_1])]
    return [
        (rows, described, [Tiles(*t) for t in UP[rows]], [Tiles(*t) for t in DOWN[rows]])
        for rows, described in BLOCKS.get(tokens, ())
    ]


def launcher(tiles: ExpertTiles) -> Callable[..., torch.Tensor]:
    return partial(triton_one_token.experts if tiles.rows == 1 else triton_grouped.experts, tiles=tiles)


def bench_experts(report: Report, w13: torch.Tensor, w2: torch.Tensor, tokens: int, *, sweep: bool) -> None:
    num_experts = w13.shape[0] - 1
    sets = choices(tokens, num_experts, 5 if tokens <= 1024 else 2)
    read = statistics.mean(len(ids.unique()) + 1 for _, _, ids in sets)
    operations = 6 * HIDDEN * INNER * tokens * (TOP_K + 1)
    floor = max(read * EXPERT_BYTES / BYTES_PER_US, operations / FLOP_PER_US)
    calls = 20 if tokens <= 8 else 10 if tokens <= 128 else 5 if tokens <= 1024 else 2
    shape = Shape(f"experts {tokens} of {num_experts}", floor, len(sets), calls)
    want = in_fp32(sets[0][0], w13, w2, *sets[0][1:])

    def measure(name: str, function: Callable[..., torch.Tensor]) -> float:
        def call(i: int) -> torch.Tensor:
            x, weights, ids = sets[i]
            return function(x, w13, w2, weights=weights, ids=ids, num_shared=1, swiglu_limit=LIMIT)

        return report.add(shape, name, call, lambda: error_of(call(0), want))

    def measure_tiles(tiles: ExpertTiles) -> float:
        ways = (", described" if tiles.described else "") + (", pdl" if tiles.pdl else "")
        name = f"{tiles.rows} rows, up {short(tiles.gate_up)}, down {short(tiles.down)}{ways}"
        return measure(name, launcher(tiles))

    measure("torch", device_impl.grouped)
    table = expert_tiles(tokens, TOP_K, num_experts)
    measure("table", launcher(table))
    measure_tiles(replace(table, pdl=not table.pdl))
    for rows, described, ups, downs in swept(tokens) if sweep else ():
        start = table.down if table.rows == rows else downs[0]
        found = {up: measure_tiles(ExpertTiles(rows, up, start, described)) for up in ups}
        best = min(found, key=lambda up: found[up])
        for down in downs:
            if down != start:
                measure_tiles(ExpertTiles(rows, best, down, described))


def short(tiles: Tiles) -> str:
    return f"({tiles.columns}, {tiles.depth}, {tiles.warps}, {tiles.stages})"


def routers(tokens: int, num_experts: int) -> list[RouterTiles]:
    tried = list(LANES if tokens == 1 else FEW_LANES if tokens <= 16 else [])
    tried += [RouterTiles(*dot, 3, dot=True) for dot in DOTS.get(tokens, ())]
    tried = [tiles for plain in tried for tiles in (plain, replace(plain, pdl=True))]
    table = router_tiles(tokens, num_experts, torch.bfloat16)
    return list(dict.fromkeys([*tried, *([table] if table is not None else [])]))


def bench_route(report: Report, num_experts: int, tokens: int, *, sweep: bool) -> None:
    sets = 72 * 64 // num_experts
    weight = torch.randn(sets, num_experts, HIDDEN, device="cuda") / HIDDEN**0.5
    bias, x = torch.randn(num_experts, device="cuda") * 0.3, draw(tokens, HIDDEN)
    read = 4 * num_experts * HIDDEN + 2 * tokens * HIDDEN
    floor = max(read / BYTES_PER_US, 2 * tokens * num_experts * HIDDEN / FP32_FLOP_PER_US)
    shape = Shape(f"route {tokens} of {num_experts}", floor, sets, sets if tokens <= 256 else 5)
    want = torch_impl.route(x, weight[0], bias, **CHOICE)[0]

    def measure(name: str, function: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        report.add(
            shape,
            name,
            lambda i: function(x, weight[i], bias, **CHOICE),
            lambda: error_of(function(x, weight[0], bias, **CHOICE)[0], want),
        )

    measure("torch", torch_impl.route)
    measure("table", partial(triton_route.route, tiles=router_tiles(tokens, num_experts, torch.bfloat16)))
    measure("library's product", partial(triton_route.route, tiles=None))
    for tiles in routers(tokens, num_experts) if sweep else ():
        measure(str(tiles), partial(triton_route.route, tiles=tiles))


def bench_swiglu(report: Report, tokens: int, inner: int) -> None:
    gate_up = [draw(tokens, 2 * inner) for _ in range(4)]
    shape = Shape(f"swiglu {tokens} x {inner}", 6 * tokens * inner / BYTES_PER_US, 4, 20)
    want = reference.swiglu(gate_up[0].float(), limit=LIMIT)

    def measure(name: str, function: Callable[..., torch.Tensor]) -> None:
        def call(i: int) -> torch.Tensor:
            return function(gate_up[i], limit=LIMIT)

        report.add(shape, name, call, lambda: error_of(call(0), want))

    measure("torch", torch_impl.swiglu)
    measure("table", triton_swiglu.swiglu)


def bench_rope(report: Report, tokens: int, *, interleaved: bool) -> None:
    heads, dim = 64, 64
    x = [draw(tokens, heads, 192)[..., -dim:] for _ in range(4)]
    close = [part.contiguous() for part in x]
    angle = torch.rand(tokens, dim // 2, device="cuda") * 6
    cos, sin = angle.cos(), angle.sin()
    floor = (4 * heads * dim + 4 * dim) * tokens / BYTES_PER_US
    shape = Shape(f"rope of {'pairs' if interleaved else 'halves'} {tokens}", floor, 4, 20)
    want = rope_torch.apply_rope(x[0].float(), cos, sin, interleaved=interleaved)

    def measure(name: str, function: Callable[..., torch.Tensor]) -> None:
        def call(i: int) -> torch.Tensor:
            return function(x[i], cos, sin, interleaved=interleaved)

        report.add(shape, name, call, lambda: error_of(call(0), want))

    measure("torch", rope_torch.apply_rope)
    measure("table", triton_rope.apply_rope)
    for elements, warps in ((4096, 8), (8192, 8), (1024, 2), (1024, 4)) if tokens > 1000 else ():
        measure(f"{elements} elements, {warps} warps", partial(triton_rope.apply_rope, elements=elements, warps=warps))
    x = close
    measure("table, contiguous", triton_rope.apply_rope)


Job = tuple[int, int, ExpertTiles | RouterTiles]
"""Tokens, experts, tiles."""


def compile_one(job: Job) -> None:
    """In a process of its own: fill Triton's cache on disk. One expert and a shared one are enough to compile for."""
    tokens, num_experts, tiles = job
    x = draw(tokens, HIDDEN)
    try:
        if isinstance(tiles, RouterTiles):
            weight, bias = torch.zeros(num_experts, HIDDEN, device="cuda"), torch.zeros(num_experts, device="cuda")
            triton_route.route(x, weight, bias, **CHOICE, tiles=tiles)
        else:
            w13, w2 = draw(2, 2 * INNER, HIDDEN), draw(2, HIDDEN, INNER)
            ids, weights = torch.zeros(tokens, TOP_K, dtype=torch.int64, device="cuda"), x.new_ones(tokens, TOP_K)
            launcher(tiles)(x, w13, w2, ids=ids, weights=weights.float(), num_shared=1, swiglu_limit=LIMIT)
        torch.cuda.synchronize()
    except Exception as fault:  # noqa: BLE001  # reported when the variant is timed
        print(f"{tiles}: {type(fault).__name__}")


def jobs(expert_tokens: Iterable[int], router_tokens: Iterable[int], *, sweep: bool) -> Iterator[Job]:
    for tokens in expert_tokens:
        enough = tokens if tokens == 1 else 2 if tokens <= triton_grouped.FP32_PARTIAL_TOKENS else 65
        for pdl in (False, True):
            yield enough, 1, replace(expert_tiles(tokens, TOP_K, 64), pdl=pdl)
        for rows, described, ups, downs in swept(tokens) if sweep else ():
            for i in range(max(len(ups), len(downs))):
                yield enough, 1, ExpertTiles(rows, ups[i % len(ups)], downs[i % len(downs)], described)
    for tokens in router_tokens:
        for num_experts in ROUTED:
            table = router_tiles(tokens, num_experts, torch.bfloat16)
            for tiles in routers(tokens, num_experts) if sweep else [table]:
                yield tokens, num_experts, tiles


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=out_file)
    parser.add_argument("--only", choices=["experts", "route", "elementwise"])
    parser.add_argument("--tables", action="store_true", help="sweep nothing")
    options = parser.parse_args()
    sweep = not options.tables
    torch.manual_seed(1)
    report, began = Report(out=options.out), time.monotonic()
    parts = (options.only,) if options.only else ("experts", "route", "elementwise")
    expert_tokens = EXPERT_TOKENS if "experts" in parts else ()
    router_tokens = ROUTER_TOKENS if "route" in parts else ()
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, dict.fromkeys(jobs(expert_tokens, router_tokens, sweep=sweep))))
    print(f"compiled after {time.monotonic() - began:.0f} s")
    with torch.inference_mode():
        for num_experts in ROUTED if expert_tokens else ():
            w13 = draw(num_experts + 1, 2 * INNER, HIDDEN, spread=HIDDEN**-0.5)
            w2 = draw(num_experts + 1, HIDDEN, INNER, spread=INNER**-0.5)
            for tokens in expert_tokens if num_experts == ROUTED[0] else (1, 8, 64):
                bench_experts(report, w13, w2, tokens, sweep=sweep and num_experts == ROUTED[0])
            print(f"experts of {num_experts} after {time.monotonic() - began:.0f} s")
        for tokens in router_tokens:
            for num_experts in ROUTED:
                bench_route(report, num_experts, tokens, sweep=sweep)
        if "elementwise" in parts:
            for tokens, inner in ((1, 12288), (64, 12288), (8192, 2048)):
                bench_swiglu(report, tokens, inner)
            for tokens in (1, 64, 8192):
                bench_rope(report, tokens, interleaved=True)
                bench_rope(report, tokens, interleaved=False)
    report.show()
    seconds = round(time.monotonic() - began, 1)
    made = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "seconds": seconds, "rows": report.rows}
    keep(options.out, made)
    print(f"{made['device']}, {seconds} s")


if __name__ == "__main__":
    main()
