"""Time KDA on a GPU, decode steps and prompts: every launch against the formula first, then a table.

    PYTHONPATH=. python benchmarks/kernels/bench_kda.py [results.json] [--only decodes|prompts] [--rows 8 64]

The shape is GLM-5.3-Flash's: 64 heads of 128, bf16, fp32 state. Floor of a decode step: the state of each row read once
and written once (8.4 MB) at 4.28 TB/s; times are medians of replayed graphs of 20 calls. Beside it stands what a kernel
that only scales the states in place takes: nothing that reads and writes them all can be faster. "In a layer" is what a
step adds to the two projections around it, which decide when it can start and what may start before it ends. Floor of a
prompt's chunked product: see ``triton_chunked``; times are medians of eager calls.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.kernels.results import keep, out_file
from sidestream.core.batch import Split
from sidestream.core.ring import plan_ring
from sidestream.ops.kda import mixed_step, reference, torch_chunked, torch_impl, triton_chunked, triton_conv
from sidestream.ops.kda.torch_impl import ForgetGate
from sidestream.ops.kda.triton_decode import EARLY_ROWS, Launch, decode_step
from sidestream.ops.kda.triton_decode import launch_for as decode_launch
from sidestream.ops.linear import linear, triton_linear
from sidestream.ops.linear.launches import launch_for

HEADS, DIM, WINDOW, HIDDEN = 64, 128, 4, 4096
BYTES_PER_S = 4.28e12
BATCHES = (64, 8, 32, 1, 16, 128, 4, 2)
"""Rows of a step, the weightier first: time may run out."""
BARS = {1: 8.0, 64: 1.1 * 125.4, 128: 1.1 * 250.9}
"""Microseconds of a decode step, from the convolution to the gated norm."""
PROMPT, PROMPT_BAR_MS = 8192, 2.5
"""Tokens, and what the token mixing of one layer may take for them."""
KEPT = (*(128 << power for power in range(6)), PROMPT - 64)
"""Places of a prompt whose states the prefix cache keeps: guesses, and its last full block."""
CALLS, REPLAYS, BUDGET_S = 20, 15, float(os.environ.get("BENCH_SECONDS", "50"))
L2_BYTES = 100e6
WORST = 0.02
"""Relative error in norm: bf16 results against fp32 ones."""

FEW = [
    Launch(True, early=True),
    Launch(True, early=True, releases=True),
    Launch(False),
    *(Launch(False, early=True, ahead=ahead) for ahead in (2, 4, 6)),
    *(Launch(True, early=True, releases=True, ahead=ahead) for ahead in (2, 4, 6)),
    Launch(True, early=True, releases=True, late=True),
    Launch(True, early=True, releases=True, late=True, ahead=2),
    Launch(True, early=True, ahead=6, beyond=4),
]
MANY = [
    Launch(True),
    Launch(True, rows=64),
    *(Launch(True, ahead=ahead) for ahead in (2, 4, 6)),
    *(Launch(True, early=True, ahead=ahead) for ahead in (2, 4, 6)),
    *(Launch(True, beyond=beyond) for beyond in (2, 4, 6)),
    Launch(True, early=True, ahead=4, beyond=2),
    Launch(True, streaming=True),
    Launch(True, early=True, ahead=4, beyond=2, streaming=True),
]
"""Launches of decode steps of up to ``EARLY_ROWS`` rows, and of more. A row of states is 4.2 MB: 2, 4 and 6 of them are
8, 17 and 25 MB of an L2 cache of 50."""
CHUNKS = [triton_chunked.Launch(), triton_chunked.Launch(blocks=False)]


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


@triton.jit  # type: ignore[untyped-decorator]
def _scale_states(state: tl.tensor, D: tl.constexpr, COLUMNS: tl.constexpr) -> None:
    piece = tl.program_id(0).to(tl.int64)
    column = (piece % (D // COLUMNS)) * COLUMNS + tl.arange(0, COLUMNS)
    at = state + (piece // (D // COLUMNS)) * D * D + tl.arange(0, D)[:, None] * D + column[None, :]
    tl.store(at, tl.load(at) * 0.999)


def scale_states(made: dict[str, Any]) -> None:
    states = made["state"][1:]
    _scale_states[(states.numel() // (DIM * 64),)](states, DIM, 64, num_warps=4)


def check(launch: Launch) -> float:
    """Largest relative error of output and state, right behind a projection that lets this step start early."""
    rows = 7
    decode_step(**arguments(rows, seed=2), launch=launch)  # compiled, so that the next one is not late
    base = arguments(rows, seed=1)
    x = torch.randn(rows, 256, device="cuda").bfloat16()
    weight = torch.randn(base["projected"].shape[1], 256, device="cuda").bfloat16() / 16
    tiles = launch_for(rows, *weight.shape)
    assert tiles is not None
    truth = on_cpu({**base, "projected": triton_linear.linear(x, weight, None, launch=tiles)})
    want = reference.decode_step(**truth)
    out = decode_step(**{**base, "projected": triton_linear.linear(x, weight, None, launch=tiles)}, launch=launch)
    assert torch.equal(base["conv_state"].cpu(), truth["conv_state"]), launch
    return max(error(out, want), error(base["state"][1:], truth["state"][1:]))


def check_many(launch: Launch, rows: int) -> float:
    """Largest relative error against the plain kernel, whose loads nobody ordered; twice the same bits."""
    base, results = arguments(rows, seed=1), []
    for tried in (Launch(ordered=False), launch, launch):
        mine = {**base, **{name: base[name].clone() for name in ("state", "conv_state")}}
        torch.cuda.synchronize()
        out = decode_step(**mine, launch=tried)
        results.append((out, mine["state"][1:], mine["conv_state"][WINDOW - 1 :]))
    plain, first, second = results
    if not all(map(torch.equal, first, second)):
        return float("inf")
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(first, plain, strict=True))


def prompt(tokens: int, heads: int, seed: int) -> tuple[dict[str, torch.Tensor], ForgetGate]:
    gen = torch.Generator(device="cuda").manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=gen)

    q, k = torch.nn.functional.normalize(randn(2, tokens, heads, DIM), dim=-1).bfloat16().unbind(0)
    made = {"q": q, "k": k, "v": randn(tokens, heads, DIM).bfloat16(), "forget": randn(tokens, heads, DIM).bfloat16()}
    gate = ForgetGate(randn(heads * DIM), torch.rand(heads, device="cuda", generator=gen), -5.0)
    return {**made, "beta": randn(tokens, heads).bfloat16()}, gate


def check_chunks(launch: triton_chunked.Launch) -> float:
    """Largest relative error of output and state: two sequences, one of them continuing."""
    made, gate = prompt(700, 4, seed=5)
    state = torch.randn(3, 1, 4, DIM, DIM, device="cuda")
    truth, where = state.clone(), {"slots": [2, 1], "starts": [9, 0], "lengths": [630, 70]}
    out = triton_chunked.chunked(**made, gate=gate, state=state, **where, launch=launch)
    g = torch_impl.gate(made["forget"].flatten(1), gate.dt_bias, gate.A_log, lower_bound=gate.lower_bound)
    exact = {name: made[name].float() for name in ("q", "k", "v")}
    want = torch_chunked.chunked(**exact, g=g, beta=made["beta"].float().sigmoid(), state=truth, **where)
    return max(error(out, want.cpu()), error(state[1:], truth[1:].cpu()))


def first_run(launch: Launch | triton_chunked.Launch) -> tuple[float, str]:
    """In a process of its own, so that launches compile side by side: (error, what went wrong)."""
    try:
        found = check(launch) if isinstance(launch, Launch) else check_chunks(launch)
    except Exception as problem:  # noqa: BLE001  # a launch that cannot run is a result
        return float("inf"), repr(problem)[:300]
    return found, ""


def milliseconds(call: Callable[[], object]) -> float:
    call()
    spans = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end))
    return statistics.median(spans)


def kernels(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds a call of each kernel."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    averages = [entry for entry in profile.key_averages() if entry.self_device_time_total > 0]
    return {entry.key[:60]: entry.self_device_time_total / 1e3 for entry in averages}


def time_decodes(
    launches: list[Launch], batches: list[int], results: dict[str, Any], until: float, path: Path | None
) -> None:
    for rows in batches:
        state_bytes = 8 * rows * HEADS * DIM * DIM
        floor = state_bytes / BYTES_PER_S * 1e6
        count = min(CALLS, max(2, int(L2_BYTES // (state_bytes // 2)) + 1))
        sets, times = [arguments(rows, seed=i) for i in range(count)], {}
        tried = [launch for launch in launches if launch in (FEW if rows <= EARLY_ROWS else MANY)]
        for launch in tried:
            if time.monotonic() > until:
                print(f"out of time: {launch} not timed at batch {rows}")
            else:
                times[str(launch)] = timed(lambda made, launch=launch: decode_step(**made, launch=launch), sets)
        parts = {"states scaled in place": timed(scale_states, sets)}
        in_layer = time_in_layer(tried, sets) if time.monotonic() < until else {}
        chosen = times.get(str(decode_launch(torch.device("cuda"), rows)))
        results["shapes"][rows] = {"floor_us": floor, "bar_us": BARS.get(rows), "us": times, "parts_us": parts}
        results["shapes"][rows]["in_layer_us"] = in_layer
        keep(path, results)
        bar = f"{BARS[rows]:.1f}" if rows in BARS else "-"
        now = f"{chosen:.2f}" if chosen is not None else "-"
        print(f"batch {rows}: floor {floor:.1f} us, bar {bar} us, as launched {now} us, {parts}")
        for name, value in sorted(times.items(), key=lambda item: item[1]):
            layer = f"{in_layer[name]:8.2f} us in a layer" if name in in_layer else ""
            print(f"  {value:8.2f} us  {value / floor:5.2f} x floor {layer}  {name}")
        del sets


def time_in_layer(launches: list[Launch], sets: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds that each launch adds to the projections before and behind it."""
    rows, columns = sets[0]["projected"].shape
    x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    weight = torch.randn(columns, HIDDEN, device="cuda").bfloat16() / HIDDEN**0.5
    behind = torch.randn(HIDDEN, HEADS * DIM, device="cuda").bfloat16() / (HEADS * DIM) ** 0.5
    mixed = torch.randn(rows, HEADS * DIM, device="cuda").bfloat16()

    def projections(_made: dict[str, Any]) -> None:
        linear(x, weight, None)
        linear(mixed, behind, None)

    def layer(made: dict[str, Any], launch: Launch) -> None:
        projected = linear(x, weight, None)
        linear(decode_step(**{**made, "projected": projected}, launch=launch), behind, None)

    alone = timed(projections, sets)
    return {str(one): timed(lambda made, one=one: layer(made, one), sets) - alone for one in launches}


def time_convolutions(results: dict[str, Any], path: Path | None) -> None:
    """Of one prompt and of many short ones, in which every walk meets a start."""
    for lengths in ([PROMPT], [100] * (PROMPT // 100)):
        count, device = len(lengths), torch.device("cuda")
        starts, slots = [9 * (i % 2) for i in range(count)], list(range(1, count + 1))
        plan = plan_ring(starts, lengths, slots, window=WINDOW, ring_length=WINDOW - 1, device=device)
        width, tokens = 3 * HEADS * DIM, sum(lengths)
        x = torch.randn(tokens, width + 2 * DIM + HEADS, device=device).bfloat16()[:, :width]
        held = torch.randn((count + 1) * (WINDOW - 1), width, device=device).bfloat16()
        weight = torch.randn(WINDOW, width, device=device).t()
        want = torch_impl.short_conv(x, held.clone(), weight, plan=plan).view(tokens, 3, HEADS, DIM).transpose(0, 1)
        shorter = want[:2].float().square().sum(-1, keepdim=True).add(torch_impl.L2_EPS).rsqrt()
        want = torch.cat([want[:2] * shorter, want[2:]])

        convolve = partial(triton_conv.heads_conv, x, held, weight, plan=plan, tokens=tokens, first=0, dim=DIM)
        off = float((convolve().float() - want.float()).norm() / want.float().norm())
        found = {"ms": milliseconds(convolve), "error": off, "kernels_ms": kernels(convolve)}
        results["convolution"][f"{count} prompts"] = found
        keep(path, results)
        print(f"  {found['ms']:.3f} ms  {count} prompts convolved, off by {off:.1e}  {found['kernels_ms']}")


def time_prompts(launches: list[triton_chunked.Launch], results: dict[str, Any], path: Path | None) -> None:
    made, gate = prompt(PROMPT, HEADS, seed=0)
    state = torch.zeros(2, 1, HEADS, DIM, DIM, device="cuda")
    where = {"slots": [1], "starts": [0], "lengths": [PROMPT]}
    for launch in launches:

        def run(launch: triton_chunked.Launch = launch) -> object:
            return triton_chunked.chunked(**made, gate=gate, state=state, **where, launch=launch)

        found = {"ms": milliseconds(run), "kernels_ms": kernels(run)}
        results["chunked"][str(launch)] = found
        keep(path, results)
        print(f"  {found['ms']:.3f} ms  {launch}  {found['kernels_ms']}")
    base = arguments(1, seed=0)
    plan = plan_ring([0], [PROMPT], [1], window=WINDOW, ring_length=WINDOW - 1, device=torch.device("cuda"))
    row = base["projected"].shape[1]
    step = {**base, "projected": torch.randn(PROMPT, row, device="cuda").bfloat16(), "plan": plan, "decodes": 0}
    step |= {"start": torch.zeros(1, dtype=torch.int64, device="cuda"), "slots": torch.tensor([1], device="cuda")}
    step |= {"host_slots": [1], "starts": [0], "lengths": [PROMPT]}

    def mix() -> object:
        return mixed_step(step["projected"], **{name: value for name, value in step.items() if name != "projected"})

    whole = {"ms": milliseconds(mix), "kernels_ms": kernels(mix)}
    results["mixed_step"] = whole
    keep(path, results)
    print(f"mixed step of {PROMPT} tokens: {whole['ms']:.3f} ms, bar {PROMPT_BAR_MS} ms, {whole['kernels_ms']}")
    kept = (tuple(Split(place, 2 + i) for i, place in enumerate(KEPT)),)
    step |= {"kept": kept, "state": torch.zeros(2 + len(KEPT), 1, HEADS, DIM, DIM, device="cuda")}
    step["conv_state"] = base["conv_state"].new_zeros((2 + len(KEPT)) * (WINDOW - 1), 3 * HEADS * DIM)
    plain = plan_ring([0], [PROMPT], [1], window=WINDOW, ring_length=WINDOW - 1)
    keeping = plain.with_kept([0], [PROMPT], [1], kept)
    step["plan"] = keeping.moved([tensor.cuda() for tensor in keeping.tensors])
    found = {"ms": milliseconds(mix), "kernels_ms": kernels(mix)}
    results["mixed_step_keeping"] = {**found, "states": len(KEPT)}
    keep(path, results)
    print(f"  leaving {len(KEPT)} states: {found['ms']:.3f} ms, {found['ms'] / whole['ms']:.3f} of that")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=out_file)
    parser.add_argument("--only", choices=("decodes", "prompts"))
    parser.add_argument("--rows", type=int, nargs="+", default=BATCHES, help="of the decode steps that are timed")
    args = parser.parse_args()
    path = args.out
    began = time.monotonic()
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    results |= {"shapes": {}, "chunked": {}, "convolution": {}}
    launches: list[Launch | triton_chunked.Launch] = []
    launches += [] if args.only == "prompts" else FEW + MANY
    launches += [] if args.only == "decodes" else CHUNKS
    with ProcessPoolExecutor(min(15, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        found = dict(zip(map(str, launches), pool.map(first_run, launches), strict=True))
    results["errors"] = {name: value for name, (value, _) in found.items()}
    for name, (value, problem) in found.items():
        if not value < WORST:
            print(f"WRONG by {value:.1e}: {name} {problem}")
    right = [launch for launch in launches if found[str(launch)][0] < WORST]
    worst = max((found[str(launch)][0] for launch in right), default=0.0)
    print(f"{len(right)} of {len(launches)} launches are right, to {worst:.1e}; {time.monotonic() - began:.0f} s")
    if args.only != "prompts":
        decodes = [launch for launch in right if isinstance(launch, Launch)]
        many = {str(launch): check_many(launch, 150) for launch in decodes}
        results["errors_of_150_rows"] = many
        for name, value in many.items():
            if not value < WORST:
                print(f"WRONG at 150 rows by {value:.1e}: {name}")
        good = [launch for launch in decodes if many[str(launch)] < WORST]
        time_decodes(good, args.rows, results, began + BUDGET_S, path)
    if args.only != "decodes":
        time_convolutions(results, path)
        time_prompts([launch for launch in right if not isinstance(launch, Launch)], results, path)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
