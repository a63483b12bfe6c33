"""Time the router of few tokens on a GPU where its table changes: each checked, then timed as ``bench_moe.py`` does.

    PYTHONPATH=. python benchmarks/kernels/bench_route.py OUT.json [--experts 64 288] [--tokens 1 8 64]

``table`` is what the launcher takes, beside the rows of the table before and behind it: how the product is cut, and
whether each expert's place is counted or searched for. A bound stands right where both lose.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch

from benchmarks.kernels.bench_moe import BYTES_PER_US, CHOICE, HIDDEN, Report, Shape, draw, error_of
from benchmarks.kernels.results import out_file
from sidestream.ops.moe import torch_impl, triton_route
from sidestream.ops.moe.triton_tiles import MANY_TOKENS, RouterTiles, router_table, router_tiles


def variants(tokens: int, num_experts: int) -> dict[str, RouterTiles]:
    rows = [tiles for _, tiles in router_table(num_experts, torch.bfloat16)] + [MANY_TOKENS]
    table = router_tiles(tokens, num_experts, torch.bfloat16)
    assert table is not None  # bf16
    at = rows.index(table)
    return {"table": table} | {str(tiles): tiles for tiles in rows[max(at - 1, 0) : at + 2] if tiles != table}


def compile_one(tokens: int, num_experts: int, name: str) -> None:
    """In a process of its own: fill Triton's cache on disk."""
    weight, bias = torch.zeros(num_experts, HIDDEN, device="cuda"), torch.zeros(num_experts, device="cuda")
    tiles = variants(tokens, num_experts)[name]
    try:
        triton_route.route(draw(tokens, HIDDEN), weight, bias, **CHOICE, tiles=tiles)
        torch.cuda.synchronize()
    except Exception as fault:  # noqa: BLE001  # reported when the variant is timed
        print(f"{name}: {type(fault).__name__}")


def bench(report: Report, tokens: int, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """``weight`` [sets, experts, HIDDEN]: more bytes than the L2 cache holds."""
    sets, num_experts = weight.shape[:2]
    x = draw(tokens, HIDDEN)
    floor = (4 * num_experts * HIDDEN + 2 * tokens * HIDDEN) / BYTES_PER_US
    want = torch_impl.route(x, weight[0], bias, **CHOICE)[0]
    for name, tiles in variants(tokens, num_experts).items():
        route = partial(triton_route.route, **CHOICE, tiles=tiles)
        us = report.add(
            Shape(f"route {tokens} of {num_experts}", floor, sets, sets),
            name,
            lambda i: route(x, weight[i], bias),  # noqa: B023
            lambda: error_of(route(x, weight[0], bias)[0], want),  # noqa: B023
        )
        print(f"{num_experts} experts {tokens:3d} tokens {us:7.2f} us  {name}  {report.rows[-1].get('fault', '')}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=out_file)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--experts", type=int, nargs="*", default=[64, 288])
    options = parser.parse_args()
    torch.manual_seed(1)
    jobs = [
        (tokens, num_experts, name)
        for num_experts in options.experts
        for tokens in options.tokens
        for name in variants(tokens, num_experts)
    ]
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, *zip(*jobs, strict=True)))
    report = Report(out=options.out)
    with torch.inference_mode():
        for num_experts in options.experts:
            weight = torch.randn(72 * 64 // num_experts, num_experts, HIDDEN, device="cuda") / HIDDEN**0.5
            bias = torch.randn(num_experts, device="cuda") * 0.3
            for tokens in options.tokens:
                bench(report, tokens, weight, bias)


if __name__ == "__main__":
    main()
