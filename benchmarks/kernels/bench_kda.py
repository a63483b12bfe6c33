"""Time the KDA decode step on a GPU: every launch against the formula first, then graphs of 20 calls, then a table.

    python benchmarks/kernels/bench_kda.py [results.json]

The shape is GLM-5.3-Flash's: 64 heads of 128, bf16, fp32 state. Floor: the state of each row read once and written once
(8.4 MB) at 4.28 TB/s. Expected of the best launch: 4.5 us at batch 1 (the floor is 2.0, latency is the rest), 20 at 8,
68 at 32, 132 at 64, 262 at 128.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sidestream.core.ring import plan_ring
from sidestream.ops.kda import decode, reference
from sidestream.ops.kda.triton_decode import Launch, decode_step, launch_for
from sidestream.ops.kda.triton_recurrent import recurrent

HEADS, DIM, WINDOW = 64, 128, 4
BYTES_PER_S = 4.28e12
BARS = {1: 8.0, 64: 1.1 * 125.4, 128: 1.1 * 250.9}
"""Microseconds, from the convolution to the gated norm."""
CALLS, REPLAYS, BUDGET_S = 20, 25, 52.0
L2_BYTES = 100e6
WORST = 0.02
"""Relative error in norm: bf16 results against fp32 ones."""

FEW = [Launch(True, c, w) for c, w in ((128, 8), (64, 8), (32, 4), (32, 8), (128, 16))]
MANY = [
    Launch(False, c, w, limit)
    for c, w, limit in (
        (32, 4, None),
        (16, 4, None),
        (16, 4, 80),
        (32, 8, None),
        (32, 8, 80),
        (32, 4, 96),
        (64, 8, None),
        (64, 8, 128),
        (64, 4, None),
        (128, 8, None),
    )
]


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


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    difference = (got.float().cpu() - want.float()).norm() / want.float().norm()
    return float(difference.nan_to_num(float("inf")))


def check(launches: list[Launch]) -> dict[str, float]:
    """Largest relative error of output and state by launch."""
    base = arguments(3, seed=1)
    truth = on_cpu(base)
    want = reference.decode_step(**truth)
    errors = {}
    for launch in launches:
        mine = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in base.items()}
        out = decode_step(**mine, launch=launch)
        errors[str(launch)] = max(error(out, want), error(mine["state"][1:], truth["state"][1:]))
        assert torch.equal(mine["conv_state"].cpu(), truth["conv_state"]), launch
    return errors


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


def expand_alone(made: dict[str, Any]) -> torch.Tensor:
    projected, width = made["projected"], 3 * HEADS * DIM
    low = projected[:, width : width + 2 * DIM].view(-1, 2, DIM).transpose(0, 1)
    return torch.bmm(low, made["expand"].transpose(1, 2))


def recurrent_alone(rows: int) -> Callable[[dict[str, Any]], torch.Tensor]:
    g = -torch.rand(rows, 1, HEADS, DIM, device="cuda")
    beta = torch.rand(rows, 1, HEADS, device="cuda").bfloat16()

    def call(made: dict[str, Any]) -> torch.Tensor:
        q, k, v = made["projected"][:, : 3 * HEADS * DIM].view(rows, 1, 3, HEADS, DIM).unbind(2)
        rest = {name: made[name] for name in ("state", "slots", "start")}
        return recurrent(q, k, v, g=g, beta=beta, **rest)

    return call


def main() -> None:
    began = time.monotonic()
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "shapes": {}}
    results["errors"] = check(FEW + MANY)
    print(f"checked {len(FEW + MANY)} launches: worst relative error {max(results['errors'].values()):.1e}")
    assert max(results["errors"].values()) < WORST, results["errors"]
    for rows in (1, 64, 128, 8, 32, 4, 2):
        state_bytes = 8 * rows * HEADS * DIM * DIM
        floor = state_bytes / BYTES_PER_S * 1e6
        count = min(CALLS, max(2, int(L2_BYTES // (state_bytes // 2)) + 1))
        sets = [arguments(rows, seed=i) for i in range(count)]
        times = {}
        for launch in (FEW if rows <= 8 else []) + MANY:
            if time.monotonic() - began > BUDGET_S:
                print(f"out of time: {launch} not timed at batch {rows}")
                continue
            times[str(launch)] = timed(lambda made, launch=launch: decode_step(**made, launch=launch), sets)
        parts = {
            "low-rank products alone": timed(expand_alone, sets),
            "recurrent alone": timed(recurrent_alone(rows), sets),
        }
        if rows in (1, 64):
            parts["torch composition"] = timed(lambda made: decode.decode_step(**made), sets)
        chosen = times.get(str(launch_for(rows, HEADS)))
        results["shapes"][rows] = {"floor_us": floor, "bar_us": BARS.get(rows), "us": times, "parts_us": parts}
        bar = f"{BARS[rows]:.1f}" if rows in BARS else "-"
        now = f"{chosen:.2f}" if chosen is not None else "-"
        print(f"\nbatch {rows}: floor {floor:.1f} us, bar {bar} us, launch_for {now} us")
        for name, value in sorted(times.items(), key=lambda item: item[1])[:6]:
            print(f"  {value:8.2f} us  {value / floor:5.2f} x floor  {name}")
        print("  " + ", ".join(f"{name} {value:.2f} us" for name, value in parts.items()))
        del sets
    print(f"\n{time.monotonic() - began:.0f} s")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
