"""Time expand and collapse in one launch of clusters beside the two or three launches in use, on a GPU.

    PYTHONPATH=. python benchmarks/kernels/bench_hyper_connection_cluster.py [results.json]

Each way of launching is first held against the formula, against the streams of ``triton_post`` bit for bit, against
itself (20 calls), and in a captured chain of sites against the same chain with a pause behind each call; what is wrong
is reported and not timed. Then three graphs a number of rows: ``alone``, calls on inputs of their own; ``chain``, each
site on the results of the one before; ``linears``, the same with a linear layer of 4,096 by 4,096 (33 MB, 8 copies in
turn) between, where the time of linear and site together is given: what is saved there is saved in a step. With
``summed`` the site sums eight experts and a shared one on the way.

Expected of a chain: 3.6 -> 4 us at one row, 6.1 -> 4.5 at 8, 8.7 -> 5 at 32, 9.7 -> 5.5 at 64.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
import triton

from benchmarks.kernels.bench_hyper_connection import HIDDEN, L2_BYTES, SETTINGS, WORST, arguments, error
from benchmarks.kernels.results import keep, out_file
from sidestream.ops.hyper_connection import hyper_connection_post_pre, launches, reference, triton_cluster, triton_post
from sidestream.ops.hyper_connection.launches import Cluster
from sidestream.ops.linear import linear
from sidestream.ops.moe import ExpertSum, settled

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
SUMMED = (2, 8, 32, 64)
"""Rows whose experts are summed on the way."""
LAUNCHES: list[Cluster | None] = [
    None,
    Cluster(),
    Cluster(ahead=False),
    Cluster(late=True),
    Cluster(terms=2),
    Cluster(terms=2, ahead=False),
    Cluster(rows=4, terms=2),
    Cluster(rows=4, terms=2, ahead=False),
    Cluster(warps=8, held=True),
    Cluster(warps=8, held=True, terms=2),
    Cluster(rows=4, warps=8, held=True, terms=2),
    Cluster(rows=16, ahead=False),
    Cluster(rows=16, terms=2, ahead=False),
]
"""None is what is in use."""
CALLS, REPLAYS, WEIGHTS = 16, 25, 8
Site = dict[str, Any]


@contextmanager
def using(launch: Cluster | None) -> Iterator[None]:
    with patch.object(launches, "CLUSTER_ROWS", {} if launch is None else {range(1 << 20): launch}):
        yield


def sites_of(rows: int) -> list[Site]:
    count = min(CALLS, max(2, int(L2_BYTES // (rows * 8 * HIDDEN + 1.6e6)) + 1))
    return [arguments(rows, seed=i) for i in range(count)]


def given(rows: int, summed: bool) -> tuple[torch.Tensor | ExpertSum, torch.Tensor, torch.Tensor]:
    """output, post, mix."""
    gen = torch.Generator(device="cuda").manual_seed(rows)
    draw = lambda *shape: torch.rand(*shape, device="cuda", generator=gen)  # noqa: E731
    output: torch.Tensor | ExpertSum = (2 * draw(rows, HIDDEN) - 1).bfloat16()
    if summed:
        ids = draw(rows, 64).topk(8).indices
        ids[0, 3] = -1
        output = ExpertSum(2 * draw(rows * 9, HIDDEN) - 1, draw(rows, 8) / 4, ids, 1, torch.bfloat16)
    return output, draw(rows, 4, 1), draw(rows, 4, 4).softmax(-1)


def call(
    site: Site, streams: torch.Tensor, output: torch.Tensor | ExpertSum, post: torch.Tensor, mix: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return hyper_connection_post_pre(
        streams, output, post, site["fn"], site["base"], mix=mix, norm_weight=site["norm_weight"], **SETTINGS
    )


def chained(sites: list[Site], state: tuple[Any, ...], *, calls: int, pause: bool = False) -> tuple[Any, ...]:
    """streams, output, post and mix behind so many sites."""
    for i in range(calls):
        state = call(sites[i % len(sites)], *state)
        if pause:
            torch.cuda.synchronize()
    return state


def captured(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            made = work()
    torch.cuda.synchronize()
    return graph, made


def wrong(sites: list[Site], inputs: tuple[Any, ...], launch: Cluster | None) -> list[str]:
    """What is not as it should be."""
    site, (output, post, mix) = sites[0], inputs
    got = call(site, site["streams"], output, post, mix)
    streams = triton_post.hyper_connection_post(site["streams"], output, post, mix=mix)
    exact = reference.hyper_connection_post(site["streams"], settled(output), post, mix=mix)
    rest = {name: site[name] for name in ("fn", "base", "norm_weight")}
    want = (exact, *reference.hyper_connection_pre(got[0], **rest, **SETTINGS))
    parts = zip(("streams", "input", "post", "mix"), got, want, strict=True)
    found = [f"{name} is {error(a, b):.2e} off" for name, a, b in parts if not error(a, b) < WORST[name]]
    if not torch.equal(got[0], streams):
        found.append(f"{int((got[0] != streams).sum())} elements of streams are not those of triton_post")
    for _ in range(20):
        again = call(site, site["streams"], output, post, mix)
        if not all(torch.equal(a, b) for a, b in zip(again, got, strict=True)):
            found.append("other bits at another time")
            break
    first = (site["streams"].clone(), *inputs)
    graph, made = captured(lambda: chained(sites, first, calls=8))
    for _ in range(5):
        first[0].normal_()
        for part in made:
            part.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        slowly = chained(sites, first, calls=8, pause=True)
        if not all(torch.equal(a, b) for a, b in zip(made, slowly, strict=True)):
            found.append("a chain in a graph is not the same chain with pauses")
            break
    return found


def microseconds(work: Callable[[], Any]) -> float:
    """Median of replays, a call of ``CALLS``."""
    graph, _ = captured(work)
    spans = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(spans)


def times_of(sites: list[Site], inputs: tuple[Any, ...], weights: list[torch.Tensor]) -> dict[str, float]:
    summed = isinstance(inputs[0], ExpertSum)

    def alone() -> None:
        for i in range(CALLS):
            call(sites[i % len(sites)], sites[i % len(sites)]["streams"], *inputs)

    def linears() -> None:
        state = (sites[0]["streams"], *inputs)
        for i in range(CALLS):
            streams, x, post, mix = call(sites[i % len(sites)], *state)
            done = linear(x, weights[i % len(weights)], None)
            state = (streams, inputs[0] if summed else done, post, mix)

    times = {"alone": alone, "linears": linears}
    if not summed:
        times["chain"] = lambda: chained(sites, (sites[0]["streams"], *inputs), calls=CALLS)  # type: ignore[assignment]
    return {name: microseconds(work) for name, work in times.items()}


def compile_one(job: tuple[int, bool, Cluster | None]) -> None:
    """In a process of its own: fill Triton's cache on disk."""
    rows, summed, launch = job
    try:
        site = arguments(rows, seed=0)
        with using(launch):
            call(site, site["streams"], *given(rows, summed))
        torch.cuda.synchronize()
    except Exception as fault:  # noqa: BLE001  # reported when the launch is timed
        print(f"{type(fault).__name__} of {launch}")


def places() -> dict[int, int]:
    """By size, clusters that run at once where each processor takes a multiprocessor of its own."""
    utilities = triton.runtime.driver.active.utils
    found = {}
    kernels = triton_cluster._between.device_caches[torch.cuda.current_device()][0].values()
    for kernel in kernels:
        size = kernel.metadata.num_ctas
        if size not in found:
            found[size] = utilities.cuOccupancyMaxActiveClusters(kernel.function, 200 << 10, size)
    return found


def name_of(launch: Cluster | None) -> str:
    return "in use" if launch is None else str(launch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=out_file, nargs="?")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    options = parser.parse_args()
    began = time.monotonic()
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        few = [(64, summed, launch) for launch in LAUNCHES[1:] for summed in (False, True)]
        list(pool.map(compile_one, [*few, *((rows, rows in SUMMED, None) for rows in options.rows)]))
    print(f"compiled after {time.monotonic() - began:.0f} s")
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": {}}
    weights = [torch.randn(HIDDEN, HIDDEN, device="cuda").bfloat16() / 64 for _ in range(WEIGHTS)]
    faults = 0
    for rows in options.rows:
        sites = sites_of(rows)
        for summed in (False, True) if rows in SUMMED else (False,):
            inputs, title = given(rows, summed), f"{rows} rows" + (", experts summed" if summed else "")
            case = results["cases"][title] = dict[str, Any]()
            print(f"\n{title}: us alone, in a chain, with a linear")
            for launch in LAUNCHES:
                name = name_of(launch)
                try:
                    with using(launch):
                        found = wrong(sites, inputs, launch)
                        case[name] = {"wrong": found} if found else times_of(sites, inputs, weights)
                except Exception as fault:  # noqa: BLE001  # a launch that fails is a result
                    case[name] = {"wrong": [f"{type(fault).__name__}: {str(fault)[:200]}"]}
                of = case[name]
                faults += "wrong" in of
                shown = (f"{of[part]:7.2f}" if part in of else "      -" for part in ("alone", "chain", "linears"))
                print("  WRONG " + "; ".join(of["wrong"]) if "wrong" in of else " " + "".join(shown), f" {name}")
            keep(options.out, results)
    try:
        results["clusters at once"] = places()
    except Exception as fault:  # noqa: BLE001  # times are kept
        results["clusters at once"] = f"{type(fault).__name__}: {fault}"
    keep(options.out, results)
    print(f"\nclusters at once, by size: {results['clusters at once']}; {time.monotonic() - began:.0f} s")
    if faults:
        raise SystemExit(f"{faults} launches are wrong or do not run: see above")


if __name__ == "__main__":
    main()
