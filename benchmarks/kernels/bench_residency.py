"""HiSparse's two kernels on a GPU: rows copied from pinned host memory, and residency of a step's selections.

    PYTHONPATH=. python benchmarks/kernels/bench_residency.py OUT.json [--only copies,batches,residency,steps]

Copies are compared with torch first, residency with the torch implementation. A time is the median over replays of a
graph whose calls take turns over sets of rows. Floor of a copy: bytes over the bus at 55 GB/s, which is what pinned
copies reach; a row read by a warp costs some 1.5 us of latency at either end. ``steps`` are both kernels behind each
other, as an index group has them. Each shape is timed with every plan; the last lines name the plan that is nearest to
all bars. The file is written again after each shape.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from benchmarks.kernels.results import keep as write
from benchmarks.kernels.results import out_file
from sidestream.ops.residency import new_state, torch_impl, triton_resolve
from sidestream.ops.residency.triton_resolve import ResolvePlan
from sidestream.ops.row_copy import triton_copy
from sidestream.ops.row_copy.triton_copy import CopyPlan

DEVICE = "cuda"
"""A test runs everything but the clock on a CPU."""
CALLS, REPLAYS = 10, 20
BARS = {
    (1024, 512): 12.0,
    (1024, 2048): 2048 * 1024 / 48e3,
    (1024, 16384): 16384 * 1024 / 51e3,
    (528, 512): 9.0,
    (528, 2048): 2048 * 528 / 42e3,
    (528, 16384): 16384 * 528 / 47e3,
}
"""Microseconds at most, by bytes a row and rows."""
BATCHES = (
    *((1024, 1, rows) for rows in (0, 205, 2048)),
    *((1024, 32, rows) for rows in (0, 64, 159, 205)),
    (656, 32, 159),
    (1024, 64, 256),
)
"""Bytes a row, requests, and rows of each, in lists of 4,096 places as two times 2,048 hot slots have."""
RESOLVED = (
    *((64, *shape) for shape in itertools.product((515, 2051), (1, 4), (0.0, 0.9))),
    (1, 2051, 4, 0.9),
    (32, 2051, 2, 0.9),
)
STEPPED = ((32, 2051, 1, 0.9), (32, 2051, 2, 0.9))
"""Requests, width, slots as a multiple of the top-k, share of the context on the host. In once as many slots a tenth of
each selection is missing, and more in a replay's first call; in twice as many all of a graph's selections stay."""
RESOLVE_BAR = 15.0
"""Microseconds at most for 64 requests."""
PLANS = [
    triton_copy.DEFAULT_PLAN,
    CopyPlan(),
    *(
        CopyPlan(warps=warps, programs=programs, total=programs, early=True, vectors=True, pdl=True)
        for warps, programs in itertools.product((1, 2), (1024, 2048, 4096, 16384))
    ),
]
BATCH_PLANS = [
    replace(triton_copy.DEFAULT_PLAN, programs=programs, total=total, pdl=pdl)
    for (programs, total), pdl in itertools.product(
        ((1024, 2048), (1024, 1024), (2048, 2048), (4096, 4096)), (True, False)
    )
]
RESOLVES = [
    triton_resolve.DEFAULT_PLAN,
    ResolvePlan(),
    ResolvePlan(warps=8, once=True, early=True),
]
STEPS = [
    (triton_resolve.DEFAULT_PLAN, triton_copy.DEFAULT_PLAN),
    (ResolvePlan(), replace(triton_copy.DEFAULT_PLAN, pdl=False)),
    (ResolvePlan(once=True), replace(triton_copy.DEFAULT_PLAN, pdl=False)),
]
"""Plans that are timed, those in use first."""
HOST_ROWS, LISTED = 200_000, 4096
"""Rows of the host's memory; places in a request's lists."""
KINDS = ("copies", "batches", "residency", "steps")


def graph_us(call: Callable[[int], None]) -> float:
    """Median time of one of CALLS calls in a graph."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i)
    times = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return statistics.median(times)


@cache
def host_rows(row_bytes: int) -> torch.Tensor:
    """[HOST_ROWS, row_bytes] of random bytes that the GPU can read, pinned as ``HostPool`` has its own."""
    generator = torch.Generator().manual_seed(row_bytes)
    drawn = torch.randint(0, 255, (HOST_ROWS, row_bytes), dtype=torch.uint8, generator=generator)
    return drawn.pin_memory() if DEVICE == "cuda" else drawn


def time_copy(
    host: torch.Tensor, pool: torch.Tensor, sources: Sequence[torch.Tensor], to: torch.Tensor, rows: int, plan: CopyPlan
) -> dict[str, Any]:
    """``rows`` of each request, from lists that may be longer."""
    counts = torch.full((to.shape[0],), rows, dtype=torch.int32, device=DEVICE)

    def call(i: int) -> None:
        triton_copy.copy_rows(pool, host, to=to, source=sources[i], counts=counts, plan=plan)

    pool.zero_()
    us = graph_us(call)
    right = torch.equal(pool[to[:, :rows].flatten()].cpu(), host[sources[CALLS - 1][:, :rows].flatten().cpu()])
    moved = to.shape[0] * rows * host.shape[1]
    return {"us": us, "GB/s": moved / us / 1e3, "right": right}


def time_plans(
    plans: Sequence[CopyPlan],
    host: torch.Tensor,
    pool: torch.Tensor,
    sources: Sequence[torch.Tensor],
    to: torch.Tensor,
    rows: int,
) -> list[dict[str, Any]]:
    """Each plan's time; plans that launch the same have one time, so that their scatter chooses none of them."""
    timed: dict[tuple[int, CopyPlan], dict[str, Any]] = {}
    tried = []
    for plan in plans:
        programs = plan.programs_of(*to.shape)
        launch = programs, replace(plan, programs=0, turns=0, total=0)
        if launch not in timed:
            timed[launch] = time_copy(host, pool, sources, to, rows, plan)
        tried.append({"plan": str(plan), "programs": programs} | timed[launch])
    return tried


def bench_copy(row_bytes: int, rows: int) -> dict[str, Any]:
    pool = torch.zeros(40_000, row_bytes, dtype=torch.uint8, device=DEVICE)
    sources = [torch.randperm(HOST_ROWS)[:rows].view(1, -1).to(DEVICE) for _ in range(CALLS)]
    to = torch.randperm(pool.shape[0])[:rows].view(1, -1).to(DEVICE)
    floor, bar = rows * row_bytes / 55e3, BARS[row_bytes, rows]
    tried = time_plans(PLANS, host_rows(row_bytes), pool, sources, to, rows)
    for row in tried:
        row["of_bar"] = row["us"] / bar
    usual = tried[0]
    tried.sort(key=lambda row: float(row["us"]))
    print(f"copy {rows} x {row_bytes} B: floor {floor:.1f}, bar {bar:.1f} us", flush=True)
    for row in [*tried[:3], usual]:
        shown = f"{row['us']:8.2f} us, {row['of_bar']:.3f} of the bar, {row['GB/s']:6.1f} GB/s"
        print(f"    {shown} {row['plan']} right {row['right']}", flush=True)
    met = tried[0]["us"] <= bar
    return {"row_bytes": row_bytes, "rows": rows, "floor": floor, "bar": bar, "met": met, "tried": tried}


def bench_batch(row_bytes: int, requests: int, rows: int) -> dict[str, Any]:
    """Of many requests, most of whose places in the lists count for nothing."""
    most = LISTED
    pool = torch.zeros(requests * most, row_bytes, dtype=torch.uint8, device=DEVICE)
    sources = [torch.randint(0, HOST_ROWS, (requests, most), device=DEVICE) for _ in range(CALLS)]
    to = torch.arange(requests * most, device=DEVICE).view(requests, most)
    tried = time_plans(BATCH_PLANS, host_rows(row_bytes), pool, sources, to, rows)
    tried.sort(key=lambda row: float(row["us"]))
    print(f"copy {requests} x {rows} x {row_bytes} B: floor {requests * rows * row_bytes / 55e3:.1f} us", flush=True)
    for row in tried[:2] + tried[-1:]:
        print(f"    {row['us']:8.2f} us {row['GB/s']:6.1f} GB/s {row['plan']} right {row['right']}", flush=True)
    return {"row_bytes": row_bytes, "batch": requests, "rows": rows, "tried": tried}


def nearest(copies: Sequence[dict[str, Any]]) -> tuple[str, float]:
    """The plan whose worst share of a bar is least, among those that were right and timed for every shape."""
    shares: dict[str, list[float]] = {}
    for found in copies:
        for row in found["tried"]:
            if row["right"]:
                shares.setdefault(row["plan"], []).append(row["of_bar"])
    worst = {plan: max(values) for plan, values in shares.items() if len(values) == len(copies)}
    chosen = min(worst, key=worst.__getitem__)
    return chosen, worst[chosen]


def selections(requests: int, width: int, share: float) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """(block table, selections of the calls, positions); ``share``: of each context that lies in the host pool."""
    block, blocks = 64, 512
    positions = block * blocks
    table = torch.arange(requests * blocks, device=DEVICE).view(requests, blocks)
    hosted = table[:, : int(blocks * share)]
    hosted.copy_(-1 - hosted % (HOST_ROWS // block))
    # Nine tenths of a selection come again in the next one; three rows lie in the last block.
    base = torch.rand(requests, positions - block, device=DEVICE).argsort(dim=1)
    sets = []
    for i in range(CALLS):
        chosen = base[:, i * width // 10 :][:, : width - 3]
        tail = torch.arange(positions - 3, positions, device=DEVICE).expand(requests, 3)
        sets.append(torch.cat([chosen, tail], dim=1).sort(dim=1).values.int().contiguous())
    return table, sets, positions


def bench_resolve(requests: int, width: int, slots: int, share: float) -> dict[str, Any]:
    """``slots``: times the top-k."""
    table, sets, positions = selections(requests, width, share)
    num_slots = slots * (width - 3)

    def new() -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]:
        lists = torch.zeros(2, requests, num_slots, dtype=torch.int64, device=DEVICE)
        results = {
            "out": torch.zeros(requests, width, dtype=torch.int64, device=DEVICE),
            "counts": torch.zeros(requests, dtype=torch.int32, device=DEVICE),
            "host_rows": lists[0],
            "hot_rows": lists[1],
            "misses": torch.zeros(requests, dtype=torch.int32, device=DEVICE),
            "totals": torch.zeros(requests + 1, 2, dtype=torch.int64, device=DEVICE),
        }
        return new_state(requests + 1, num_slots, positions, device=DEVICE), results

    named: dict[str, Any] = {
        "seats": torch.arange(1, requests + 1, device=DEVICE),
        "positions": torch.full((requests,), positions - 1, device=DEVICE),
        "table_rows": torch.arange(requests, device=DEVICE),
        "block_size": 64,
        "hot_base": 10**6,
    }
    want_state, want = new()
    for logical in sets[:3]:
        torch_impl.resolve(logical, table, *want_state, **named, **want)
    tried = []
    for plan in RESOLVES:
        state, got = new()
        for logical in sets[:3]:
            triton_resolve.resolve(logical, table, *state, **named, **got, plan=plan)
        right = all(torch.equal(got[name], want[name]) for name in want)
        right = right and torch.equal(state[1][:, :2], want_state[1][:, :2])

        def call(i: int, plan: ResolvePlan = plan, state: Any = state, got: Any = got) -> None:
            triton_resolve.resolve(sets[i], table, *state, **named, **got, plan=plan)

        tried.append({"plan": str(plan), "us": graph_us(call), "right": right})
    line = ", ".join(f"{row['us']:.2f}{'' if row['right'] else ' WRONG'}" for row in tried)
    bar, least = RESOLVE_BAR if requests == 64 else None, min(row["us"] for row in tried)
    told = "" if bar is None else f", bar {bar} {'met' if least <= bar else 'MISSED'}"
    print(f"resolve {requests} x {width} of {num_slots} slots, host {share}: {line}{told}", flush=True)
    return {"requests": requests, "width": width, "slots": num_slots, "host": share, "bar": bar, "tried": tried}


def bench_step(requests: int, width: int, slots: int, share: float) -> dict[str, Any]:
    """Residency, and the copies that follow from it for one layer; the call that begins a replay misses most."""
    table, sets, positions = selections(requests, width, share)
    num_slots = slots * (width - 3)
    memory = host_rows(1024)
    pool = torch.zeros((requests + 1) * num_slots, 1024, dtype=torch.uint8, device=DEVICE)
    lists = torch.zeros(2, requests, num_slots, dtype=torch.int64, device=DEVICE)
    out = torch.zeros(requests, width, dtype=torch.int64, device=DEVICE)
    counts, misses = (torch.zeros(requests, dtype=torch.int32, device=DEVICE) for _ in range(2))
    seats, rows = torch.arange(1, requests + 1, device=DEVICE), torch.arange(requests, device=DEVICE)
    last = torch.full((requests,), positions - 1, device=DEVICE)
    tried = []
    for resolving, copying in STEPS:
        state = new_state(requests + 1, num_slots, positions, device=DEVICE)
        totals = torch.zeros(requests + 1, 2, dtype=torch.int64, device=DEVICE)

        def call(
            i: int, state: Any = state, totals: Any = totals, r: ResolvePlan = resolving, c: CopyPlan = copying
        ) -> None:
            triton_resolve.resolve(
                sets[i], table, *state, seats=seats, positions=last, table_rows=rows, block_size=64, hot_base=0,
                out=out, counts=counts, host_rows=lists[0], hot_rows=lists[1], misses=misses, totals=totals, plan=r,
            )  # fmt: skip
            triton_copy.copy_rows(pool, memory, to=lists[1], source=lists[0], counts=misses, plan=c)

        us = graph_us(call)
        chosen = sets[CALLS - 1].long()
        block = table.gather(1, chosen // 64)
        on_host = block < 0
        source = (-1 - block[on_host]) * 64 + chosen[on_host] % 64
        right = torch.equal(pool[out[on_host]].cpu(), memory[source.cpu()])
        tried.append({"plans": f"{resolving} {copying}", "us": us, "right": right})
    line = ", ".join(f"{row['us']:.2f}{'' if row['right'] else ' WRONG'}" for row in tried)
    print(f"step {requests} x {width} of {num_slots} slots, host {share}: {line}", flush=True)
    return {"requests": requests, "width": width, "slots": num_slots, "host": share, "tried": tried}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=out_file)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds, with commas")
    args = parser.parse_args(arguments)
    kinds = args.only.split(",")
    if not {*kinds} <= {*KINDS}:
        raise SystemExit(f"--only {args.only!r} names other kinds than {', '.join(KINDS)}")
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE
    found: dict[str, Any] = {"device": name} | {kind: [] for kind in KINDS}

    def keep(kind: str, row: dict[str, Any]) -> None:
        found[kind].append(row)
        write(args.out, found)

    shapes: dict[str, Sequence[tuple[Any, ...]]] = {
        "copies": list(BARS),
        "batches": BATCHES,
        "residency": RESOLVED,
        "steps": STEPPED,
    }
    benches: dict[str, Callable[..., dict[str, Any]]] = {
        "copies": bench_copy,
        "batches": bench_batch,
        "residency": bench_resolve,
        "steps": bench_step,
    }
    for kind in kinds:
        for shape in shapes[kind]:
            keep(kind, benches[kind](*shape))
    for row_bytes in (1024, 528) if found["copies"] else ():
        of_width = [copy for copy in found["copies"] if copy["row_bytes"] == row_bytes]
        plan, share = nearest(of_width)
        found[f"nearest to the bars, {row_bytes} B"] = {"plan": plan, "worst share of a bar": share}
        print(f"nearest to the bars of {row_bytes} B: {plan}, {share:.3f} of the worst", flush=True)
    met = sum(copy["met"] for copy in found["copies"])
    print(f"{met} of {len(found['copies'])} bars of copies met; resolves: {[str(plan) for plan in RESOLVES]}")
    write(args.out, found)


if __name__ == "__main__":
    main()
