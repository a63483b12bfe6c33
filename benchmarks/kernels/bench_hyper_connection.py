"""Time hyper-connections (and an RMS norm) on a GPU: every launch against the formula first, then graphs of 20 calls.

    PYTHONPATH=. python benchmarks/kernels/bench_hyper_connection.py [results.json] [--tables]

The shape is GLM-5.3-Flash's: 4 streams of 4,096, bf16, 20 Sinkhorn iterations. Floor of collapse and expand: streams
read twice and written once, input and output once each, 112 KB a row, and ``fn`` once, at 4.28 TB/s. Expected of both
together: 5.0 us at batch 1, 6.0 at 8, 6.5 at 64; 290 at 8,192 rows.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.kernels.results import keep, out_file
from sidestream.ops.hyper_connection import reference, torch_impl
from sidestream.ops.hyper_connection import triton_post as post_kernel
from sidestream.ops.hyper_connection import triton_post_pre as joint_kernel
from sidestream.ops.hyper_connection import triton_pre as pre_kernel
from sidestream.ops.hyper_connection.triton_pre import Launch
from sidestream.ops.norm import triton_norms

STREAMS, HIDDEN = 4, 4096
SETTINGS: dict[str, Any] = {"norm_eps": 1e-5, "eps": 1e-6, "iters": 20}
BYTES_PER_S = 4.28e12
BARS = {1: 5.0, 64: 8.0}
"""Microseconds of collapse and expand together."""
CALLS, REPLAYS, BUDGET_S = 20, 25, 52.0
L2_BYTES = 100e6
WORST = {"input": 0.01, "post": 1e-5, "mix": 1e-5, "streams": 0.01}
"""Relative error in norm: bf16 results, and fp32 ones behind products of 16,384 terms."""

PRODUCTS = {
    1: [(16, s, d, w) for s, d, w in ((128, 128, 4), (64, 256, 4))]
    + [(1, 128, 128, 4), (1, 64, 256, 4), (1, 256, 64, 4)],
    8: [(16, s, d, w) for s, d, w in ((128, 128, 4), (64, 256, 4), (256, 64, 4))],
    64: [(b, s, d, 4) for b, s, d in ((64, 128, 128), (64, 64, 64), (32, 128, 128), (64, 256, 64), (16, 128, 128))],
    8192: [(b, s, d, w) for b, s, d, w in ((64, 8, 64, 4), (64, 4, 64, 4), (128, 4, 64, 8))],
}
"""By rows: (block, shares, depth, warps)."""
FINISHES = [
    (4, 1, False, False),
    (4, 1, True, False),
    (4, 1, True, True),
    (8, 1, True, True),
    (8, 1, False, False),
    (2, 1, True, True),
]
"""(warps, Sinkhorn rows, overlap, early), with the best products."""
MANY_FINISHES = [(4, 128, False, False), (4, 64, False, False), (8, 128, False, False), (8, 256, False, False)]
EXPANDS = [
    post_kernel.Launch(*choice)
    for choice in ((512, 4), (512, 4, True), (1024, 4), (1024, 4, True), (256, 2), (256, 2, True), (2048, 8), (4096, 8))
]

JOINT = {
    1: [(1, 64, 256, 4)],
    8: [(16, 128, 128, 4), (16, 64, 256, 4)],
    32: [(16, 64, 256, 4), (32, 64, 256, 8)],
    64: [(16, 64, 256, 4), (32, 64, 256, 8), (64, 64, 256, 8), (64, 128, 128, 4), (16, 32, 512, 8)],
}
"""By rows: (block, shares, depth, warps) of expand and collapse in two kernels."""


def arguments(rows: int, seed: int) -> dict[str, Any]:
    gen = torch.Generator(device="cuda").manual_seed(seed)
    rounds = (2 + STREAMS) * STREAMS
    return {
        "streams": torch.randn(rows, STREAMS, HIDDEN, device="cuda", generator=gen).bfloat16(),
        "fn": torch.randn(rounds, STREAMS * HIDDEN, device="cuda", generator=gen) / (STREAMS * HIDDEN) ** 0.5,
        "base": torch.randn(rounds, device="cuda", generator=gen),
        "norm_weight": torch.rand(2, HIDDEN, device="cuda", generator=gen).bfloat16() + 0.5,
    }


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    difference = (got.double() - want.double()).norm() / want.double().norm()
    return float(difference.nan_to_num(float("inf")))


def check(made: dict[str, Any], want: tuple[torch.Tensor, ...], launch: Launch) -> None:
    got = pre_kernel.hyper_connection_pre(**made, **SETTINGS, launch=launch)
    for name, a, b in zip(("input", "post", "mix"), got, want, strict=True):
        assert error(a, b) < WORST[name], (name, error(a, b), launch)


def timed(call: Callable[[dict[str, Any]], object], sets: list[dict[str, Any]]) -> float:
    """Median microseconds a call, in replays of a graph of ``CALLS`` over the sets in turn."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(sets[0])
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(CALLS):
                call(sets[i % len(sets)])
        graph.replay()
        spans = []
        for _ in range(REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            spans.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(spans)


def best(times: dict[Any, float]) -> Any:
    return min(times, key=lambda launch: times[launch])


def collapse_times(rows: int, sets: list[dict[str, Any]], deadline: float) -> dict[Launch, float]:
    """Products with one finish, then finishes with the best products; each checked before it is timed."""
    finishes = FINISHES if rows <= 512 else MANY_FINISHES
    want = reference.hyper_connection_pre(**sets[0], **SETTINGS)
    times: dict[Launch, float] = {}

    def add(products: tuple[int, int, int, int], finish: tuple[int, int, bool, bool]) -> None:
        launch = Launch(*products, *finish)
        if time.monotonic() < deadline and launch not in times:
            check(sets[0], want, launch)
            call = lambda made: pre_kernel.hyper_connection_pre(**made, **SETTINGS, launch=launch)  # noqa: E731
            times[launch] = timed(call, sets)

    for products in PRODUCTS[rows]:
        add(products, finishes[0])
    chosen = best(times)
    for finish in finishes[1:]:
        add((chosen.block, chosen.shares, chosen.depth, chosen.warps), finish)
    return times


def expand_times(rows: int, sets: list[dict[str, Any]]) -> dict[post_kernel.Launch, float]:
    made = sets[0]
    normed, post, mix = reference.hyper_connection_pre(**made, **SETTINGS)
    want = reference.hyper_connection_post(made["streams"], normed, post, mix=mix)
    times = {}
    for launch in EXPANDS:
        call = lambda made, launch=launch: post_kernel.hyper_connection_post(  # noqa: E731
            made["streams"], normed, post, mix=mix, launch=launch
        )
        assert error(call(made), want) < WORST["streams"], launch
        times[launch] = timed(call, sets)
    return times


def joint_launches(rows: int) -> list[Launch]:
    made = [
        Launch(*choice, finish_warps=4, overlap=True, early=True, factors=True, late=True)
        for choice in JOINT[max(r for r in JOINT if r <= rows)]
    ]
    return [*made, replace(made[0], late=False), replace(made[0], early=False)]


def apart_launches(rows: int) -> list[Launch]:
    """Of the collapse with an expand of its own: what is off in the table."""
    factors = replace(pre_kernel.launch_for(rows, STREAMS * HIDDEN), factors=True)
    late = replace(factors, late=True)
    return list(dict.fromkeys([factors, late, replace(late, early=not late.early)]))


def parts_times(made: dict[str, Any], launch: Launch, sets: list[dict[str, Any]]) -> list[float]:
    """Both kernels of ``jointly``, each alone in a row of itself."""
    output, post, mix = reference.hyper_connection_pre(**made, **SETTINGS)
    new, partials = joint_kernel.mixed(made["streams"], output, post, made["fn"], mix=mix, launch=launch)
    first = timed(
        lambda made: joint_kernel.mixed(made["streams"], output, post, made["fn"], mix=mix, launch=launch), sets
    )
    rest = {"base": made["base"], "norm_weight": made["norm_weight"], **SETTINGS, "launch": launch, "fresh": True}
    return [first, timed(lambda _: pre_kernel.finish(new, partials, **rest), sets)]


def jointly(made: dict[str, Any], weights: tuple[torch.Tensor, ...], launch: Launch | None) -> tuple[torch.Tensor, ...]:
    output, post, mix = weights
    return joint_kernel.hyper_connection_post_pre(
        made["streams"], output, post, made["fn"], made["base"], mix=mix, norm_weight=made["norm_weight"],
        **SETTINGS, launch=launch,
    )  # fmt: skip


def joint_times(rows: int, sets: list[dict[str, Any]], launches: list[Launch]) -> dict[str, float]:
    """Expand, then the next collapse: what lies between two sublayers."""
    made = sets[0]
    weights = reference.hyper_connection_pre(**made, **SETTINGS)
    new = reference.hyper_connection_post(made["streams"], weights[0], weights[1], mix=weights[2])
    want = (new, *reference.hyper_connection_pre(**{**made, "streams": new}, **SETTINGS))
    times = {}
    for launch in [*([None] if rows <= joint_kernel.MOST_ROWS else []), *launches]:
        name = str(launch or "launch_for")
        times[name] = float("inf")
        try:
            got = jointly(made, weights, launch)
        except Exception as fault:  # noqa: BLE001  # a variant that cannot be launched is a result
            print(f"{type(fault).__name__} at {rows} rows: {str(fault)[:120]} {name}")
            continue
        errors = {part: error(a, b) for part, a, b in zip(("streams", "input", "post", "mix"), got, want, strict=True)}
        # rounded streams differ by a bf16 step here and there, which moves what follows
        if all(errors[part] < 10 * WORST[part] for part in errors):
            times[name] = timed(lambda made, launch=launch: jointly(made, weights, launch), sets)  # type: ignore[misc]
        else:
            print(f"WRONG at {rows} rows: {errors} {name}")
    return times


def short(launch: object) -> str:
    return re.sub(r"(\w+)=False, |, (\w+)=False|sinkhorn_rows=1, |=True", "", str(launch))


def compile_one(job: tuple[int, Launch | None]) -> None:
    """In a process of its own: fill Triton's cache on disk. No launch is expand and collapse apart, and the table's."""
    rows, launch = job
    made = arguments(rows, seed=0)
    try:
        if launch is None:
            for ahead in (False, True):
                both(made, None, replace(post_kernel.launch_for(rows), ahead=ahead))
            for apart in [None, *apart_launches(rows)]:
                both(made, apart, None)
        if launch is not None or rows <= joint_kernel.MOST_ROWS:
            jointly(made, reference.hyper_connection_pre(**made, **SETTINGS), launch)
        torch.cuda.synchronize()
    except Exception as fault:  # noqa: BLE001  # reported when the variant is timed
        print(f"{type(fault).__name__} of {launch}")


def both(made: dict[str, Any], launch: Launch | None, expand: post_kernel.Launch | None) -> torch.Tensor:
    normed, post, mix = pre_kernel.hyper_connection_pre(**made, **SETTINGS, launch=launch)
    return post_kernel.hyper_connection_post(made["streams"], normed, post, mix=mix, launch=expand)


def both_in_torch(made: dict[str, Any]) -> torch.Tensor:
    normed, post, mix = torch_impl.hyper_connection_pre(**made, **SETTINGS)
    return torch_impl.hyper_connection_post(made["streams"], normed, post, mix=mix)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=out_file, nargs="?")
    parser.add_argument("--tables", action="store_true", help="sweep nothing")
    parser.add_argument("--joint", action="store_true", help="sweep expand and collapse in two kernels alone")
    options = parser.parse_args()
    began = time.monotonic()
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "shapes": {}}
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        tried = [] if options.tables else [(rows, launch) for rows in JOINT for launch in [None, *joint_launches(rows)]]
        list(pool.map(compile_one, tried))
    print(f"compiled after {time.monotonic() - began:.0f} s")
    for rows in sorted(JOINT if options.joint else PRODUCTS):
        row_bytes = STREAMS * HIDDEN * 2
        floor = (rows * (3 * row_bytes + 4 * HIDDEN) + 24 * STREAMS * HIDDEN * 4) / BYTES_PER_S * 1e6
        count = min(CALLS, max(2, int(L2_BYTES // (rows * row_bytes + 1.6e6)) + 1))
        sets = [arguments(rows, seed=i) for i in range(count)]
        joint = joint_times(rows, sets, [] if options.tables or rows > 64 else joint_launches(rows))
        collapses: dict[Launch, float] = {}
        expands: dict[post_kernel.Launch, float] = {}
        together = {"launch_for": timed(lambda made: both(made, None, None), sets)}
        parts: dict[str, list[float]] = {}
        for apart in apart_launches(rows) if options.joint else ():
            check(sets[0], reference.hyper_connection_pre(**sets[0], **SETTINGS), apart)
            together[str(apart)] = timed(lambda made: both(made, apart, None), sets)  # noqa: B023
        for tried_launch in joint_launches(rows) if options.joint else ():
            if joint.get(str(tried_launch), float("inf")) < float("inf"):
                parts[str(tried_launch)] = parts_times(sets[0], tried_launch, sets)
        usual = post_kernel.launch_for(rows)
        if usual.early:
            other = replace(usual, ahead=not usual.ahead)
            assert error(both(sets[0], None, other), both(sets[0], None, usual)) == 0.0, rows
            name = "streams ahead of the wait" if other.ahead else "streams behind the wait"
            together[name] = timed(lambda made: both(made, None, other), sets)  # noqa: B023
        if not (options.tables or options.joint):
            collapses, expands = collapse_times(rows, sets, began + BUDGET_S), expand_times(rows, sets)
            launches = best(collapses), best(expands)
            together["best launches"] = timed(lambda made: both(made, *launches), sets)  # noqa: B023
        x, weight = sets[0]["streams"][:, 0].contiguous(), sets[0]["norm_weight"][0]
        together["rms_norm alone"] = timed(lambda _: triton_norms.rms_norm(x, weight, 1e-5), sets)  # noqa: B023
        if rows <= 64 and not options.joint:
            together["torch"] = timed(both_in_torch, sets)
        results["shapes"][rows] = {
            "floor_us": floor,
            "bar_us": BARS.get(rows),
            "collapse_us": {str(launch): value for launch, value in collapses.items()},
            "expand_us": {str(launch): value for launch, value in expands.items()},
            "together_us": together,
            "joint_us": joint,
            "parts_us": parts,
        }
        keep(options.out, results)
        print(f"\n{rows} rows: floor {floor:.1f} us, bar {BARS.get(rows, '-')} us")
        for title, times in (("together", together), ("joint", joint), ("collapse", collapses), ("expand", expands)):
            for launch, value in sorted(times.items(), key=lambda item: item[1])[:8]:
                alone = "".join(f" {part:6.2f}" for part in parts.get(str(launch), ()))
                print(f"  {title:8s} {value:8.2f} us {alone} {short(launch)}")
        del sets
    print(f"\n{time.monotonic() - began:.0f} s")
    if any(float("inf") in shape["joint_us"].values() for shape in results["shapes"].values()):
        raise SystemExit("a variant is wrong or does not run: see above")


if __name__ == "__main__":
    main()
