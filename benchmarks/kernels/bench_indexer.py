"""Indexer of a decode step on a GPU: each stage and the whole, checked, timed in graphs, beside floor, guess and bar.

    PYTHONPATH=. python benchmarks/kernels/bench_indexer.py [OUT.json] [--only glm5]

A time is the median over replays of a graph of 20 calls or more, which take turns over so many sets of pages that the
L2 cache holds none of them when its turn comes, divided by the calls. Checks use small integers, whose scores are exact
in bf16 products, so the selection must equal the torch implementation's in every entry.

Keys include their norm (and rotation at token granularity). Floor: keys (256 B an entry) and scores touched once over
4.28 TB/s. A launch in a graph costs 1.5 to 2 us beyond that, a selection some 12 rounds of counting. Expected, in us:

| shape | keys | scores | select | map | whole |
| --- | --- | --- | --- | --- | --- |
| glm5 1 x 8k | 2 | 3 | 4 | 2 | 10.5 |
| glm5 64 x 8k | 2 | 11 | 5 | 2.5 | 20 |
| glm5 1 x 8k in a table for 256k | 2 | 3.5 | 4.5 | 2 | 11.5 |
| glm5 1 x 256k | 2 | 5 | 12 | 2 | 20 |
| v32 1 x 8k | 2 | 3.5 | 6 | 2 | 13 |
| v32 64 x 8k | 2 | 38 | 10 | 2.5 | 52 |
| top 2,048 of 4 x 131,072 | | | 16 | | |
| top 512 of 64 x 32,768 | | | 15 | | |
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
import triton

from benchmarks.kernels.results import keep, out_file
from sidestream.core.ring import plan_ring
from sidestream.ops.index_map import torch_impl as map_torch
from sidestream.ops.index_map.triton_map import DEFAULT_PLAN, MapPlan, logical_to_physical
from sidestream.ops.indexer import decode, keys
from sidestream.ops.indexer.triton_decode import ScorePlan, paged_scores, score_plan, select_topk_decode
from sidestream.ops.indexer.triton_keys import POOLS_PLAN, KeysPlan, write_normed_keys, write_pools
from sidestream.ops.topk import torch_impl as topk_torch
from sidestream.ops.topk.triton_select import (
    MAX_SPLITS,
    PhysicalRows,
    SelectPlan,
    select_plan,
    select_rows,
    topk_ascending,
)

BYTES_PER_US = 4.28e6
L2_BYTES = 80e6
"""Pages that are touched between two calls on the same ones: the cache holds 50 MB."""
CALLS, MOST_CALLS, REPLAYS = 20, 192, 15
BUDGET_S = 26.0
DIM, BLOCK = 128, 64


@dataclass(frozen=True)
class Shape:
    """``table`` tokens is what the block table has room for."""

    name: str
    rows: int
    tokens: int
    table: int
    heads: int
    kpool: int
    topk: int = 2048
    bar: float | None = None

    @property
    def entries(self) -> int:
        return self.tokens // self.kpool

    @property
    def per_block(self) -> int:
        return BLOCK // self.kpool

    @property
    def copies(self) -> int:
        bytes_a_call = self.rows * self.entries * 2 * DIM
        return min(MOST_CALLS, max(2, int(L2_BYTES / bytes_a_call) + 1))


SHAPES = (
    Shape("glm5 1 x 8k", 1, 8191, 8192, 32, 4, bar=12.0),
    Shape("glm5 64 x 8k", 64, 8191, 8192, 32, 4, bar=25.0),
    Shape("glm5 1 x 8k of 256k", 1, 8191, 262144, 32, 4),
    Shape("glm5 1 x 256k", 1, 262143, 262144, 32, 4),
    Shape("v32 1 x 8k", 1, 8192, 8192, 64, 1),
    Shape("v32 64 x 8k", 64, 8192, 8192, 64, 1),
)
TOPK_SHAPES = ((4, 131072, 2048, 25.0), (64, 32768, 512, 30.0))


class Step:
    """Inputs of ``copies`` decode steps over one pool of pages, with keys in every entry that is seen."""

    def __init__(self, shape: Shape, *, copies: int, exact: bool, ragged: bool = False) -> None:
        self.shape, rows, used = shape, shape.rows, -(-shape.tokens // BLOCK)
        gen = torch.Generator(device="cuda").manual_seed(0)

        def draw(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            named: dict[str, Any] = {"device": "cuda", "generator": gen}
            return (torch.randint(-2, 3, size, **named) if exact else torch.randn(size, **named)).to(dtype)

        blocks = 1 + copies * rows * used
        self.keys = draw(blocks, shape.per_block, DIM)
        pages = torch.randperm(blocks - 1, device="cuda", generator=gen) + 1
        self.tables = torch.zeros(copies, rows, shape.table // BLOCK, dtype=torch.int64, device="cuda")
        self.tables[:, :, :used] = pages.view(copies, rows, used)
        self.q, self.weights = (
            draw(copies, rows, shape.heads, DIM),
            draw(copies, rows, shape.heads, dtype=torch.float32),
        )
        self.k, self.gate = draw(copies, rows, DIM), draw(copies, rows, DIM)
        self.ape = draw(4, DIM, dtype=torch.float32)
        lens = torch.full((rows,), shape.tokens)
        if ragged:
            special = torch.tensor([0, 1, 2047, 2048, 2051, 2052, 2053, shape.tokens - 1])
            lens[1:] = special.repeat(rows // 8 + 1)[: rows - 1]
        self.lens = lens.cuda()
        self.norm: dict[str, Any] = {"norm_weight": draw(DIM), "norm_bias": draw(DIM), "norm_eps": 1e-6}
        self.turn: dict[str, Any] = {"cos": None, "sin": None, "interleaved": False}
        if shape.kpool == 1:  # half of the channels, by right angles where integers shall stay integers
            turns = torch.randint(0, 4, (rows, DIM // 4), device="cuda", generator=gen) * torch.pi / 2
            self.turn |= {"cos": turns.cos().round(), "sin": turns.sin().round()}
        self.tail = draw((rows + 1) * 3, 2 * DIM)
        positions = (lens - 1).clamp_min(0).tolist()
        plan = plan_ring(positions, [1] * rows, list(range(1, rows + 1)), window=4, ring_length=3)
        self.plan = plan.moved([tensor.cuda() for tensor in plan.tensors])
        self.own_rows = torch.arange(rows, device="cuda")
        self.tickets = torch.zeros(rows, dtype=torch.int32, device="cuda")
        # As if each row completed a pool in its first page.
        self.places = [self.tables[i, :, 0] * shape.per_block for i in range(copies)]
        width = shape.topk + shape.kpool - 1
        self.out = torch.full((rows, width), 0x7F7F, dtype=torch.int32, device="cuda")
        self.rows = torch.full((rows, width), 0x7F7F, dtype=torch.int64, device="cuda")
        self.counts = torch.full((rows,), 0x7F7F, dtype=torch.int32, device="cuda")

    def write(self, i: int, launch: KeysPlan) -> None:
        flat = self.keys.view(-1, DIM)
        if self.shape.kpool == 1:
            write_normed_keys(flat, self.places[i], self.k[i], launch=launch, **self.norm, **self.turn)
        else:
            shared: dict[str, Any] = {"tail": self.tail, "plan": self.plan, "entries": self.places[i], "launch": launch}
            write_pools(self.k[i], self.gate[i], self.ape, keys_flat=flat, **shared, **self.norm)

    def score(self, i: int, plan: ScorePlan) -> torch.Tensor:
        shape = self.shape
        named: dict[str, Any] = {"block_table": self.tables[i], "context_lens": self.lens, "kpool": shape.kpool}
        named |= {"picks": shape.topk // shape.kpool, "tickets": self.tickets, "plan": plan, **self.turn}
        return paged_scores(self.q[i], self.weights[i], self.keys, **named)

    def arguments(self, i: int) -> dict[str, Any]:
        shape = self.shape
        named = {"block_table": self.tables[i], "context_lens": self.lens, "topk": shape.topk, "kpool": shape.kpool}
        return named | {"scale": DIM**-0.5, "out": self.out, **self.turn}

    def select(self, i: int, *, fused: bool, scoring: ScorePlan, selecting: SelectPlan) -> None:
        physical = PhysicalRows(self.tables[i], self.rows, self.counts) if fused else None
        plans: dict[str, Any] = {"scoring": scoring, "selecting": selecting, "physical": physical}
        select_topk_decode(self.q[i], self.weights[i], self.keys, **self.arguments(i), **plans)

    def map(self, i: int, plan: MapPlan) -> None:
        named = {"token_rows": self.own_rows, "out": self.rows, "counts": self.counts}
        logical_to_physical(self.out, self.tables[i], block_size=BLOCK, plan=plan, **named)


def timed(call: Callable[[int], object], copies: int) -> float:
    """Median microseconds a call, in replays of a graph whose calls go over the copies in turn."""
    calls = max(CALLS, copies)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                call(i % copies)
        graph.replay()
        spans = []
        for _ in range(REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            spans.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(spans)


def best_of(variants: Iterable[Any], run: Callable[[Any], float], *, until: float) -> list[tuple[float, Any]]:
    """(us, variant), best first; those that do not compile or fit are left out, and the rest once time is up."""
    found = []
    for variant in variants:
        if found and time.monotonic() > until:
            break
        try:
            found.append((run(variant), variant))
        except Exception as error:  # noqa: BLE001  # a variant that needs too much shared memory is no result
            print(f"  {variant}: {type(error).__name__}")
    return sorted(found, key=lambda pair: pair[0])


def score_variants(shape: Shape) -> list[ScorePlan]:
    """The table's choice first; no other kernel has to be compiled for the others."""
    usual = score_plan(shape.rows, shape.table // shape.kpool, shape.heads)
    made = [usual, replace(usual, splits=-(-usual.splits // 2)), replace(usual, splits=2 * usual.splits)]
    return list(dict.fromkeys(made))


def select_variants(entries: int, picks: int, *, rows: int) -> list[SelectPlan]:
    """The table's choice first."""
    usual = select_plan(entries, picks, rows=rows)
    assert usual is not None
    made = [usual, replace(usual, warps=usual.warps * 2)]
    if usual.merge:
        made += [replace(usual, splits=min(2 * usual.splits, MAX_SPLITS)), replace(usual, splits=-(-usual.splits // 2))]
    return list(dict.fromkeys(made))


def launches(shape: Shape) -> list[tuple[ScorePlan, SelectPlan, bool]]:
    """What is checked: every variant once, and the usual one with the map in the top-k and with early launches."""
    scorings = score_variants(shape)
    selectings = select_variants(shape.table // shape.kpool, shape.topk // shape.kpool, rows=shape.rows)
    pairs = [(scorings[0], selecting, False) for selecting in selectings]
    pairs += [(scoring, selectings[0], True) for scoring in scorings]
    for fused, other in ((False, {"pdl": False}), (True, {"late": True})):
        pairs.append((replace(scorings[0], **other), replace(selectings[0], **other), fused))
    return pairs


def check_shape(shape: Shape, scoring: ScorePlan, selecting: SelectPlan, fused: bool) -> None:
    """One way to launch, with the map behind or in the top-k, against the torch operators, on ragged lengths."""
    step = Step(shape, copies=1, exact=True, ragged=True)
    decode.select_topk_decode(step.q[0], step.weights[0], step.keys, **step.arguments(0))
    want, want_rows, want_counts = step.out.clone(), torch.empty_like(step.rows), torch.empty_like(step.counts)
    named: dict[str, Any] = {"token_rows": step.own_rows, "block_size": BLOCK, "out": want_rows, "counts": want_counts}
    map_torch.logical_to_physical(want, step.tables[0], **named)
    step.out.fill_(0x7F7F7F7F)
    step.select(0, fused=fused, scoring=scoring, selecting=selecting)
    if not fused:
        step.map(0, replace(DEFAULT_PLAN, pdl=selecting.pdl))
    equal = [torch.equal(step.out, want), torch.equal(step.rows, want_rows), torch.equal(step.counts, want_counts)]
    assert all(equal), f"selection, rows, counts {equal} by {scoring} {selecting}, fused {fused}"
    if shape.kpool > 1:
        tail, pool = step.tail.clone(), step.keys.clone()
        shared: dict[str, Any] = {"tail": tail, "plan": step.plan, "keys_flat": pool.view(-1, DIM)}
        keys.write_pools(step.k[0], step.gate[0], step.ape, entries=step.places[0], **shared, **step.norm)
        step.write(0, POOLS_PLAN)
        pooled = step.places[0][step.lens >= 4]  # others have no whole pool
        got, kept = (t.view(-1, DIM)[pooled].float() for t in (step.keys, pool))
        torch.testing.assert_close(got, kept, rtol=2**-7, atol=2e-6)
        torch.testing.assert_close(step.tail[3:].float(), tail[3:].float(), rtol=2**-7, atol=2e-6)


def measure_shape(shape: Shape, until: float) -> dict[str, Any]:
    """Each stage's sweep, then the whole: map behind, in the top-k, on a side stream, none at all, with PDL."""
    entries, picks = shape.table // shape.kpool, shape.topk // shape.kpool
    scorings, selectings = score_variants(shape), select_variants(entries, picks, rows=shape.rows)
    step, copies = Step(shape, copies=shape.copies, exact=False), shape.copies
    scored = [step.score(i, scorings[0]) for i in range(min(copies, 4))]

    def pick(i: int, plan: SelectPlan) -> None:
        shared: dict[str, Any] = {"picks": picks, "kpool": shape.kpool, "per_block": shape.per_block}
        select_rows(scored[i % len(scored)], step.lens, step.out, plan=plan, tickets=step.tickets, **shared)

    sweeps: dict[str, list[tuple[float, Any]]] = {}
    writers = [POOLS_PLAN, replace(POOLS_PLAN, warps=2)]
    maps = [DEFAULT_PLAN, MapPlan(512, 4)]
    sweeps["keys"] = best_of(writers, lambda v: timed(lambda i: step.write(i, v), copies), until=until)
    sweeps["select"] = best_of(selectings, lambda v: timed(lambda i: pick(i, v), copies), until=until)
    sweeps["map"] = best_of(maps, lambda v: timed(lambda i: step.map(i, v), copies), until=until)
    sweeps["scores"] = best_of(scorings, lambda v: timed(lambda i: step.score(i, v), copies), until=until)
    table = {"keys": POOLS_PLAN, "scores": scorings[0], "select": selectings[0], "map": DEFAULT_PLAN}
    best = {name: sweep[0][1] for name, sweep in sweeps.items()}

    side = torch.cuda.Stream()

    def whole(i: int, plans: dict[str, Any], *, where: str, start: str) -> None:
        chosen: dict[str, Any] = {name: replace(plan, pdl=start != ", launched late") for name, plan in plans.items()}
        chosen |= {name: replace(chosen[name], late=start == ", released late") for name in ("scores", "select")}
        step.write(i, chosen["keys"])
        step.select(i, fused=where == "fused", scoring=chosen["scores"], selecting=chosen["select"])
        if where == "behind":
            step.map(i, chosen["map"])
        elif where == "side":  # with nothing beside it: the price of the two handoffs
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step.map(i, chosen["map"])
            torch.cuda.current_stream().wait_stream(side)

    kinds = [(table, where, "") for where in ("behind", "fused", "side", "none")] + [(best, "behind", "")]
    kinds += [(table, "behind", ", launched late"), *((table, w, ", released late") for w in ("behind", "fused"))]
    totals = {}
    for plans, where, start in kinds:
        called = partial(whole, plans=plans, where=where, start=start)
        totals[f"{'best' if plans is best else 'table'}, map {where}{start}"] = timed(called, copies)
    floor = shape.rows * shape.entries * (2 * DIM + 8) / BYTES_PER_US
    return {"shape": shape.name, "bar": shape.bar, "floor": floor, "whole": totals, "sweeps": sweeps}


def check_topk(rows: int, size: int, k: int, plan: SelectPlan) -> None:
    """On scores without ties, with many and with NaN, and all equal."""
    out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
    tickets = torch.zeros(rows, dtype=torch.int32, device="cuda")
    scores, valid = torch.randn(rows, size, device="cuda"), torch.full((rows,), size, device="cuda")
    rough = scores.round(decimals=1)
    rough[:, ::7] = torch.nan
    for data, lens in product((scores, rough, torch.zeros_like(rough)), (valid, valid - 5)):
        select_rows(data, lens, out, picks=k, kpool=1, per_block=1, plan=plan, tickets=tickets)
        assert torch.equal(out, topk_torch.topk_ascending(data, lens, k)), f"top {k} of {rows} x {size} by {plan}"


def measure_topk(rows: int, size: int, k: int, bar: float | None, until: float) -> dict[str, Any]:
    copies = min(MOST_CALLS, max(2, int(L2_BYTES / (rows * size * 4)) + 1))
    scores, valid = torch.randn(copies, rows, size, device="cuda"), torch.full((rows,), size, device="cuda")
    out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
    tickets = torch.zeros(rows, dtype=torch.int32, device="cuda")

    def pick(i: int, plan: SelectPlan) -> None:
        select_rows(scores[i], valid, out, picks=k, kpool=1, per_block=1, plan=plan, tickets=tickets)

    variants = select_variants(size, k, rows=rows)
    sweep = best_of(variants, lambda v: timed(lambda i: pick(i, v), copies), until=until)
    whole = {"table": timed(lambda i: topk_ascending(scores[i], valid, k), copies), "best": sweep[0][0]}
    floor = rows * size * 4 / BYTES_PER_US
    return {
        "shape": f"top {k} of {rows} x {size}",
        "bar": bar,
        "floor": floor,
        "whole": whole,
        "sweeps": {"select": sweep},
    }


def show(result: dict[str, Any]) -> None:
    bar = f"bar {result['bar'] or 0:.0f}"
    whole = "; ".join(f"{name} {us:.1f}" for name, us in result["whole"].items())
    print(f"{result['shape']}: floor {result['floor']:.2f}, {bar}, whole: {whole}", flush=True)
    for name, sweep in result["sweeps"].items():
        for us, plan in sweep[:3]:
            print(f"    {name:7} {us:6.2f}  {plan}")


def check(task: tuple[Callable[..., None], tuple[Any, ...]]) -> str:
    """What is wrong, if anything; in a process of its own, so that all kernels are compiled side by side."""
    call, arguments = task
    try:
        call(*arguments)
    except triton.runtime.errors.OutOfResources:
        return ""
    except Exception as error:  # noqa: BLE001  # timings of the others are wanted all the same
        return f"{arguments}: {type(error).__name__}: {error}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=out_file)
    parser.add_argument("--only", default="", help="part of a shape's name")
    arguments = parser.parse_args()
    begin = time.monotonic()
    measures: dict[str, Callable[[float], dict[str, Any]]] = {
        f"top {a[2]} of {a[0]} x {a[1]}": partial(measure_topk, *a) for a in TOPK_SHAPES
    }
    measures |= {s.name: partial(measure_shape, s) for s in SHAPES}
    names = [name for name in measures if arguments.only in name]
    tasks: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
    for shape in SHAPES:
        tasks += [(check_shape, (shape, *launch)) for launch in launches(shape) if shape.name in names]
    for a in TOPK_SHAPES:
        plans = select_variants(a[1], a[2], rows=a[0]) if f"top {a[2]} of {a[0]} x {a[1]}" in names else []
        tasks += [(check_topk, (*a[:3], plan)) for plan in plans]
    with ProcessPoolExecutor(max_workers=15, mp_context=get_context("spawn")) as pool:
        wrong = [found for found in pool.map(check, tasks) if found]
    checked = time.monotonic()
    print(f"checked in {checked - begin:.0f} s", flush=True)
    share = max(begin + BUDGET_S - checked, 10.0) / len(names)
    results = []
    for number, name in enumerate(names):
        results.append(measures[name](checked + share * (number + 1)))
        keep(arguments.out, {"wrong": wrong, "results": results})
        show(results[-1])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.monotonic() - begin:.0f} s; microseconds")
    if wrong:
        sys.exit("WRONG\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
