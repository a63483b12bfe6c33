"""Time variants of the router of few tokens on a GPU: each checked, then timed in graphs, as ``bench_moe.py`` does.

    PYTHONPATH=. python benchmarks/kernels/bench_route.py OUT.json [--tokens 1 8 64]

A variant is how the product is cut, and whether each expert's place is counted or searched for. ``table`` is what the
launcher takes.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.kernels.bench_moe import BYTES_PER_US, CHOICE, HIDDEN, Report, Shape, draw, error_of
from benchmarks.kernels.results import out_file
from sidestream.ops.moe import torch_impl, triton_route
from sidestream.ops.moe.triton_tiles import RouterTiles, router_tiles

NUM_EXPERTS = 64
FEW = [RouterTiles(16, 32, 64, 64, 4, 1, dot=True, pdl=True), RouterTiles(16, 16, 128, 32, 4, 1, dot=True, pdl=True)]
MANY = [RouterTiles(64, 16, 128, 32, 4, 1, dot=True, pdl=True), RouterTiles(64, 16, 64, 64, 4, 1, dot=True, pdl=True)]
CUTS = {1: FEW, 8: [*FEW, replace(FEW[1], choice_warps=1)], 16: FEW, 32: MANY, 64: MANY}
"""By tokens: a program's share of the depth is one step, whose weights it loads before it waits for the tokens."""


def variants(tokens: int) -> dict[str, dict[str, Any]]:
    table = router_tiles(tokens, torch.bfloat16)
    cuts = CUTS[max(least for least in CUTS if least <= tokens)]
    made: dict[str, dict[str, Any]] = {"table": {"tiles": table}, "table, counted": {"tiles": table, "ranked": True}}
    return made | {f"counted, {tiles}": {"tiles": tiles, "ranked": True} for tiles in cuts}


def compile_one(tokens: int, name: str) -> None:
    """In a process of its own: fill Triton's cache on disk."""
    weight, bias = torch.zeros(NUM_EXPERTS, HIDDEN, device="cuda"), torch.zeros(NUM_EXPERTS, device="cuda")
    try:
        triton_route.route(draw(tokens, HIDDEN), weight, bias, **CHOICE, **variants(tokens)[name])
        torch.cuda.synchronize()
    except Exception as fault:  # noqa: BLE001  # reported when the variant is timed
        print(f"{name}: {type(fault).__name__}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=out_file)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 16, 32, 64])
    options = parser.parse_args()
    torch.manual_seed(1)
    jobs = [(tokens, name) for tokens in options.tokens for name in variants(tokens)]
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, *zip(*jobs, strict=True)))
    report, sets = Report(out=options.out), 72
    weight = torch.randn(sets, NUM_EXPERTS, HIDDEN, device="cuda") / HIDDEN**0.5
    bias = torch.randn(NUM_EXPERTS, device="cuda") * 0.3
    with torch.inference_mode():
        for tokens in options.tokens:
            x = draw(tokens, HIDDEN)
            floor = (4 * NUM_EXPERTS * HIDDEN + 2 * tokens * HIDDEN) / BYTES_PER_US
            want = torch_impl.route(x, weight[0], bias, **CHOICE)[0]
            for name, chosen in variants(tokens).items():
                route = partial(triton_route.route, **CHOICE, **chosen)
                us = report.add(
                    Shape(f"route {tokens} of {NUM_EXPERTS}", floor, sets, sets),
                    name,
                    lambda i: route(x, weight[i], bias),  # noqa: B023
                    lambda: error_of(route(x, weight[0], bias)[0], want),  # noqa: B023
                )
                print(f"{tokens:3d} tokens {us:7.2f} us  {name}  {report.rows[-1].get('fault', '')}")


if __name__ == "__main__":
    main()
