"""KDA of prompts on a GPU, for ``bench_kda``: launches against the formula, then medians of eager calls."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.results import keep
from sidestream.core.batch import Split
from sidestream.core.ring import plan_ring
from sidestream.ops.kda import mixed_step, torch_chunked, torch_impl, triton_chunked, triton_conv
from sidestream.ops.kda.torch_impl import ForgetGate

HEADS, DIM, WINDOW = 64, 128, 4
PROMPT, PROMPT_BAR_MS = 8192, 2.5
"""Tokens, and what the token mixing of one layer may take for them."""
KEPT = (*(128 << power for power in range(6)), PROMPT - 64)
"""Places of a prompt whose states the prefix cache keeps: guesses, and its last full block."""
CHUNKS = [triton_chunked.Launch(), triton_chunked.Launch(blocks=False)]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    difference = (got.float().cpu() - want.float()).norm() / want.float().norm()
    return float(difference.nan_to_num(float("inf")))


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


def time_prompts(
    launches: list[triton_chunked.Launch], base: dict[str, Any], results: dict[str, Any], path: Path | None
) -> None:
    """``base``: arguments of a decode step of one row, of which a mixed step takes its weights."""
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
