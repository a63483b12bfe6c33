"""Sampling on a GPU: the kernels in graphs, then the whole sampler, launches and uploads included.

    PYTHONPATH=. python benchmarks/kernels/bench_sampling.py OUT.json

Times of the kernels are medians over replays of a graph that calls them with several sets of logits in turn. Those of
the sampler are between two events around calls back to back, so a sampler whose host work takes longer than its kernels
shows that. Floor of the kernels: the logits once over 4.28 TB/s; the bar is 10 us at 64 rows of 32,768.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels.bench_moe import BYTES_PER_US, Report, Shape
from benchmarks.kernels.results import keep, out_file
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.sampler import Sampler, SamplingRow
from sidestream.ops.draw import torch_impl, triton_draw

SIZES = ((1, 32768), (8, 32768), (64, 32768), (64, 154880))
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(temperature=0.8, top_k=40),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.1),
}


def settings_of(kind: str, rows: int) -> torch.Tensor | None:
    if kind == "greedy":
        return None
    numbers = torch.rand(rows, dtype=torch.float64, device="cuda")
    return torch.stack([torch.full_like(numbers, 0.8), numbers])


def bench_kernels(report: Report, rows: int, vocab: int) -> None:
    logits = [torch.randn(rows, vocab, device="cuda") * 3 for _ in range(12)]
    for kind in ("greedy", "temperature"):
        settings = settings_of(kind, rows)
        shape = Shape(f"{kind} {rows} x {vocab}", 4 * rows * vocab / BYTES_PER_US, len(logits), 24)
        want = torch_impl.draw_tokens(logits[0], settings)[0]

        def measure(name: str, function: Callable[..., Any], settings: Any = settings, want: Any = want) -> None:
            def wrong() -> float:
                return float((function(logits[0], settings)[0] != want).sum())

            report.add(shape, name, lambda i: function(logits[i], settings), wrong)  # noqa: B023

        measure("torch", torch_impl.draw_tokens)
        measure("kernels", triton_draw.draw_tokens)


def whole_sampler(rows: int, vocab: int, kind: str) -> float:
    """Microseconds a call."""
    sampler, logits = Sampler(vocab), torch.randn(rows, vocab, device="cuda")
    history = list(range(500))
    of_batch = [SamplingRow(PARAMS[kind], 7 * i, history, history, num_outputs=i) for i in range(rows)]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for repeat in range(2):
        calls = 20
        begin.record()
        for _ in range(calls):
            sampler.choose(logits, of_batch)
        end.record()
        end.synchronize()
        del repeat
    return begin.elapsed_time(end) * 1000 / calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=out_file)
    options = parser.parse_args()
    torch.manual_seed(1)
    report, began, whole = Report(out=options.out), time.monotonic(), {}
    with torch.inference_mode():
        for rows, vocab in SIZES:
            bench_kernels(report, rows, vocab)
            for kind in PARAMS:
                whole[f"{kind} {rows} x {vocab}"] = round(whole_sampler(rows, vocab, kind), 1)
    report.show()
    print("whole sampler, us a call:", whole)
    made = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - began, 1),
        "kernels": report.rows,
        "sampler_us": whole,
    }
    keep(options.out, made)
    print(f"{made['device']}, {made['seconds']} s")


if __name__ == "__main__":
    main()
