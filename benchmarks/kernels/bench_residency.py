"""HiSparse's two kernels on a GPU: rows copied from pinned host memory, and residency of a step's selections.

    PYTHONPATH=. python benchmarks/kernels/bench_residency.py OUT.json

Copies are compared with torch first, residency with the torch implementation. A time is the median over replays of a
graph whose calls take turns over sets of rows. Floor of a copy: bytes over the bus at 55 GB/s, which is what pinned
copies reach; a row read by a warp costs some 1.5 us of latency at either end.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sidestream.ops.residency import new_state, torch_impl, triton_resolve
from sidestream.ops.residency.triton_resolve import ResolvePlan
from sidestream.ops.row_copy import triton_copy
from sidestream.ops.row_copy.triton_copy import CopyPlan

CALLS, REPLAYS = 10, 30
BARS = {
    (1024, 512): 12.0,
    (1024, 2048): 2048 * 1024 / 48e3,
    (1024, 16384): 16384 * 1024 / 51e3,
    (528, 512): 9.0,
    (528, 2048): 2048 * 528 / 42e3,
    (528, 16384): 16384 * 528 / 47e3,
}
"""Microseconds at most, by bytes a row and rows."""
TILES = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 2), (8, 4))
"""Rows a program and warps."""


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


def bench_copy(row_bytes: int, rows: int) -> dict[str, Any]:
    host = torch.randint(0, 255, (200_000, row_bytes), dtype=torch.uint8).pin_memory()
    pool = torch.zeros(40_000, row_bytes, dtype=torch.uint8, device="cuda")
    sources = [torch.randperm(host.shape[0])[:rows].view(1, -1).cuda() for _ in range(CALLS)]
    to = torch.randperm(pool.shape[0])[:rows].view(1, -1).cuda()
    counts = torch.tensor([rows], dtype=torch.int32, device="cuda")
    tried = []
    for (per, warps), programs in itertools.product(TILES, (132, 264, 528, 1056, 4096)):
        if -(-rows // per) < programs // 2:
            continue
        plan = CopyPlan(rows=per, warps=warps, programs=programs)

        def call(i: int, plan: CopyPlan = plan) -> None:
            triton_copy.copy_rows(pool, host, to=to, source=sources[i], counts=counts, plan=plan)

        us = graph_us(call)
        right = torch.equal(pool[to[0]].cpu(), host[sources[CALLS - 1][0].cpu()])
        tried.append({"plan": str(plan), "us": us, "GB/s": rows * row_bytes / us / 1e3, "right": right})
    tried.sort(key=lambda row: row["us"])
    floor, bar = rows * row_bytes / 55e3, BARS[row_bytes, rows]
    print(f"copy {rows} x {row_bytes} B: floor {floor:.1f}, bar {bar:.1f} us", flush=True)
    for row in tried[:3]:
        print(f"    {row['us']:8.2f} us {row['GB/s']:6.1f} GB/s {row['plan']} right {row['right']}", flush=True)
    return {"row_bytes": row_bytes, "rows": rows, "floor": floor, "bar": bar, "tried": tried}


def bench_resolve(requests: int, width: int, slots: int, share: float) -> dict[str, Any]:
    """``slots``: times the top-k; ``share``: of each context that lies in the host pool."""
    block, blocks = 64, 512
    num_slots, positions = slots * (width - 3), block * blocks
    table = torch.arange(requests * blocks, device="cuda").view(requests, blocks)
    hosted = table[:, : int(blocks * share)]
    hosted.copy_(-1 - hosted)
    # Nine tenths of a selection come again in the next one; three rows lie in the last block.
    base = torch.rand(requests, positions - block, device="cuda").argsort(dim=1)
    sets = []
    for i in range(CALLS):
        chosen = base[:, i * width // 10 :][:, : width - 3]
        tail = torch.arange(positions - 3, positions, device="cuda").expand(requests, 3)
        sets.append(torch.cat([chosen, tail], dim=1).sort(dim=1).values.int().contiguous())

    def new() -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]:
        lists = torch.zeros(2, requests, num_slots, dtype=torch.int64, device="cuda")
        results = {
            "out": torch.zeros(requests, width, dtype=torch.int64, device="cuda"),
            "counts": torch.zeros(requests, dtype=torch.int32, device="cuda"),
            "host_rows": lists[0],
            "hot_rows": lists[1],
            "misses": torch.zeros(requests, dtype=torch.int32, device="cuda"),
            "totals": torch.zeros(requests + 1, 2, dtype=torch.int64, device="cuda"),
        }
        return new_state(requests + 1, num_slots, positions, device="cuda"), results

    named: dict[str, Any] = {
        "seats": torch.arange(1, requests + 1, device="cuda"),
        "positions": torch.full((requests,), positions - 1, device="cuda"),
        "table_rows": torch.arange(requests, device="cuda"),
        "block_size": block,
        "hot_base": 10**6,
    }
    want_state, want = new()
    for logical in sets[:3]:
        torch_impl.resolve(logical, table, *want_state, **named, **want)
    tried = []
    for warps in (8, 16, 32):
        plan, (state, got) = ResolvePlan(warps=warps), new()
        for logical in sets[:3]:
            triton_resolve.resolve(logical, table, *state, **named, **got, plan=plan)
        right = all(torch.equal(got[name], want[name]) for name in want)
        right = right and torch.equal(state[1][:, :2], want_state[1][:, :2])

        def call(i: int, plan: ResolvePlan = plan, state: Any = state, got: Any = got) -> None:
            triton_resolve.resolve(sets[i], table, *state, **named, **got, plan=plan)

        tried.append({"warps": warps, "us": graph_us(call), "right": right})
    tried.sort(key=lambda row: row["us"])
    line = ", ".join(f"{row['warps']} warps {row['us']:.2f}{'' if row['right'] else ' WRONG'}" for row in tried)
    print(f"resolve {requests} x {width} of {num_slots} slots, host {share}: {line}", flush=True)
    return {"requests": requests, "width": width, "slots": num_slots, "host": share, "tried": tried}


def main() -> None:
    torch.manual_seed(0)
    copies = [bench_copy(row_bytes, rows) for row_bytes, rows in BARS]
    shapes = itertools.product((1, 64), (515, 2051), (1, 4), (0.0, 0.9))
    found = {
        "device": torch.cuda.get_device_name(),
        "copies": copies,
        "residency": [bench_resolve(*shape) for shape in shapes],
    }
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
