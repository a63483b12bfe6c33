"""Indexer of a prefill chunk on a GPU: scores under several launches, the top-k, the whole, beside torch and the floor.

    PYTHONPATH=. python benchmarks/kernels/bench_indexer_prefill.py [OUT.json] [--only glm5]

One sequence, keys on shuffled pages, eager launches. A time is the median of several calls between two events. The
floor is the scores' products over 790 TFLOP/s, which is 2 * heads * 128 operations for each entry that a query sees
and that has to be scored. A launch is checked against torch on small integers, whose scores are exact, first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
import triton

from benchmarks.kernels.results import keep, out_file
from sidestream.core.segment import Segment
from sidestream.ops.indexer import torch_impl
from sidestream.ops.indexer.triton_prefill import (
    DEFAULT_PLAN,
    PrefillPlan,
    mixed_select_plan,
    score_segment,
    select_topk,
)
from sidestream.ops.topk.triton_select import select_rows

FLOPS_PER_US = 790e6
DIM, BLOCK, TOPK = 128, 64, 2048
REPEATS = 7


@dataclass(frozen=True)
class Chunk:
    """``length`` queries behind ``start`` tokens of one sequence."""

    name: str
    start: int
    length: int
    heads: int
    kpool: int


CHUNKS = (
    Chunk("glm5 8k prompt", 0, 8192, 32, 4),
    Chunk("glm5 last 8k of 32k", 24576, 8192, 32, 4),
    Chunk("glm5 last 512 of 128k", 130560, 512, 32, 4),
    Chunk("v32 8k prompt", 0, 8192, 64, 1),
    Chunk("v32 last 2k of 32k", 30720, 2048, 64, 1),
)


class Case:
    def __init__(self, chunk: Chunk, *, exact: bool) -> None:
        self.chunk, end = chunk, chunk.start + chunk.length
        gen = torch.Generator(device="cuda").manual_seed(0)

        def draw(*size: int) -> torch.Tensor:
            named: dict[str, Any] = {"device": "cuda", "generator": gen}
            return (torch.randint(-2, 3, size, **named) if exact else torch.randn(size, **named)).bfloat16()

        blocks = -(-end // BLOCK)
        self.table = (torch.randperm(blocks, device="cuda", generator=gen) + 1)[None]
        self.keys = draw(blocks + 1, BLOCK // chunk.kpool, DIM)
        self.q, self.weights = draw(chunk.length, chunk.heads, DIM), draw(chunk.length, chunk.heads)
        self.positions = torch.arange(chunk.start, end, device="cuda")
        self.segment = Segment(0, chunk.length, 0, chunk.start)
        self.out = torch.empty(chunk.length, TOPK + chunk.kpool - 1, dtype=torch.int32, device="cuda")
        self.picks, self.entries = TOPK // chunk.kpool, end // chunk.kpool

    @property
    def arguments(self) -> dict[str, Any]:
        shared = {"block_table": self.table, "positions": self.positions, "segments": (self.segment,), "num_decode": 0}
        return shared | {"topk": TOPK, "kpool": self.chunk.kpool, "scale": 1.0, "out": self.out}

    def whole(self, plan: PrefillPlan) -> None:
        select_topk(self.q, self.weights, self.keys, scoring=plan, **self.arguments)

    def score(self, plan: PrefillPlan, scores: torch.Tensor) -> None:
        named: dict[str, Any] = {"block_table": self.table, "picks": self.picks, "kpool": self.chunk.kpool}
        score_segment(self.q, self.weights, self.keys, scores, self.segment, first_score=0, plan=plan, **named)

    def select(self, scores: torch.Tensor) -> None:
        plan = mixed_select_plan(self.entries, self.picks, rows=self.chunk.length)
        named: dict[str, Any] = {"picks": self.picks, "kpool": self.chunk.kpool, "per_block": self.keys.shape[1]}
        select_rows(scores, self.positions + 1, self.out, plan=plan, **named)

    @property
    def flops(self) -> int:
        seen = (self.positions + 1) // self.chunk.kpool
        return int(seen[seen > self.picks].sum()) * 2 * self.chunk.heads * DIM


def timed(call: Callable[[], None]) -> float:
    call()
    spans = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(spans)


def variants(*, usual: bool) -> list[PrefillPlan]:
    if usual:
        return [DEFAULT_PLAN]
    others = [replace(DEFAULT_PLAN, warps=4), replace(DEFAULT_PLAN, columns=128, warps=4)]
    return [DEFAULT_PLAN, *others, replace(DEFAULT_PLAN, stages=3)]


def check(chunk: Chunk, plan: PrefillPlan) -> str:
    """What is wrong, if anything; in a process of its own, so that variants are compiled side by side."""
    small = replace(chunk, start=min(chunk.start, 9000), length=min(chunk.length, 3001))
    case = Case(small, exact=True)
    torch_impl.select_topk(case.q, case.weights.float(), case.keys, **case.arguments)
    want = case.out.clone()
    case.out.fill_(0x7F7F7F7F)
    try:
        case.whole(plan)
        return "" if torch.equal(case.out, want) else f"{chunk.name}: {plan} selects otherwise"
    except triton.runtime.errors.OutOfResources:
        return ""
    except Exception as error:  # noqa: BLE001  # timings of the other variants are wanted all the same
        return f"{chunk.name}: {plan}: {type(error).__name__}: {error}"


def measure(chunk: Chunk, *, usual: bool) -> dict[str, Any]:
    case = Case(chunk, exact=False)
    scores = torch.empty(chunk.length, -(-case.entries // 16) * 16, device="cuda")
    sweep = []
    for plan in variants(usual=usual):
        try:
            sweep.append((timed(lambda plan=plan: case.score(plan, scores)), str(plan)))  # type: ignore[misc]
        except Exception:  # noqa: BLE001  # checked before, and reported there
            continue
    case.score(DEFAULT_PLAN, scores)
    select, whole = timed(lambda: case.select(scores)), timed(lambda: case.whole(DEFAULT_PLAN))
    times = {"select": select, "whole": whole, "floor": case.flops / FLOPS_PER_US}
    if not usual:
        weights = case.weights.float()
        times["torch"] = timed(lambda: torch_impl.select_topk(case.q, weights, case.keys, **case.arguments))
    return {"chunk": chunk.name, "us": times, "scores": sorted(sweep)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=out_file)
    parser.add_argument("--only", default="", help="part of a chunk's name")
    parser.add_argument("--usual", action="store_true", help="neither other launches nor torch")
    arguments = parser.parse_args()
    chunks = [chunk for chunk in CHUNKS if arguments.only in chunk.name]
    tasks = list(product(chunks[::-1], variants(usual=arguments.usual)))
    if arguments.usual:
        wrong = [found for task in tasks if (found := check(*task))]
    else:
        with ProcessPoolExecutor(max_workers=12, mp_context=get_context("spawn")) as pool:
            wrong = [found for found in pool.map(check, *zip(*tasks, strict=True)) if found]
    results: list[dict[str, Any]] = []
    for chunk in chunks:
        found = measure(chunk, usual=arguments.usual)
        results.append(found)
        keep(arguments.out, {"wrong": wrong, "results": results})
        print(
            f"{found['chunk']}: " + ", ".join(f"{name} {us:.0f}" for name, us in found["us"].items()) + " us",
            flush=True,
        )
        for us, plan in found["scores"][:4]:
            print(f"    scores {us:7.0f}  {plan}")
    if wrong:
        sys.exit("WRONG\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
