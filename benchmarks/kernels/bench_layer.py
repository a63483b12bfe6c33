"""What a KDA and MoE layer of GLM-5.3-Flash costs beside its recurrence: kernels behind one another, as in a step.

    PYTHONPATH=. python benchmarks/kernels/bench_layer.py OUT.json

Kernels that start while those before them end show what that is worth only in a chain. It is: expand and collapse of
hyper-connections, the input projection, a gated norm in the place of the recurrence, the output projection, expand
and collapse, router and experts. Four layers of weights (15 GB) take turns, so that nothing is in the L2 cache. Floor:
all weights that are touched once, over 4.28 TB/s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.kernels.bench_moe import BYTES_PER_US, CHOICE, EXPERT_BYTES, HIDDEN, INNER, Report, Shape, draw
from benchmarks.kernels.results import keep, out_file
from sidestream.ops import linear as linear_operator
from sidestream.ops import moe
from sidestream.ops.hyper_connection import hyper_connection_post_pre, hyper_connection_pre
from sidestream.ops.linear import linear
from sidestream.ops.moe import ExpertSum, route, settled
from sidestream.ops.norm import gated_rms_norm

EXPERTS, HEADS, DIM = 64, 64, 128
WIDTH = HEADS * DIM
PROJECTED = 3 * WIDTH + 2 * DIM + HEADS
ROWS = (1, 2, 8, 16, 32, 64)
LAYERS, ROUNDS = 4, 3
SETTINGS: dict[str, Any] = {"norm_eps": 1e-5, "eps": 1e-6, "iters": 20}


@dataclass(frozen=True)
class Site:
    """Parameters of one hyper-connection."""

    fn: torch.Tensor
    base: torch.Tensor
    norm_weight: torch.Tensor


@dataclass(frozen=True)
class Layer:
    sites: tuple[Site, Site]
    projection: torch.Tensor
    norm: torch.Tensor
    out: torch.Tensor
    router: torch.Tensor
    bias: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    ids: torch.Tensor
    """[most rows, top_k]: chosen instead of what the router says, which another rounding would change: an expert
    more or less is 12 us."""


@dataclass(frozen=True)
class State:
    """Streams, the output that is to join them, and how."""

    streams: torch.Tensor
    output: torch.Tensor | ExpertSum
    post: torch.Tensor
    mix: torch.Tensor


def layer() -> Layer:
    sites = [Site(torch.randn(24, 4 * HIDDEN, device="cuda") / 128, torch.randn(24, device="cuda"), draw(2, HIDDEN))]
    sites.append(Site(sites[0].fn.clone(), sites[0].base.clone(), draw(2, HIDDEN)))
    return Layer(
        (sites[0], sites[1]),
        draw(PROJECTED, HIDDEN, spread=HIDDEN**-0.5),
        draw(DIM),
        draw(HIDDEN, WIDTH, spread=WIDTH**-0.5),
        torch.randn(EXPERTS, HIDDEN, device="cuda") / HIDDEN**0.5,
        torch.zeros(EXPERTS, device="cuda"),
        draw(EXPERTS + 1, 2 * INNER, HIDDEN, spread=HIDDEN**-0.5),
        draw(EXPERTS + 1, HIDDEN, INNER, spread=INNER**-0.5),
        torch.rand(max(ROWS), EXPERTS, device="cuda").topk(CHOICE["top_k"]).indices,
    )


def collapse(state: State | torch.Tensor, site: Site) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(streams, input, post, mix)."""
    if isinstance(state, torch.Tensor):
        return state, *hyper_connection_pre(state, site.fn, site.base, norm_weight=site.norm_weight, **SETTINGS)
    named = {"mix": state.mix, "norm_weight": site.norm_weight, **SETTINGS}
    return hyper_connection_post_pre(state.streams, state.output, state.post, site.fn, site.base, **named)


def through(state: State | torch.Tensor, of: Layer, seen: list[torch.Tensor] | None = None) -> State:
    streams, x, post, mix = collapse(state, of.sites[0])
    projected = linear(x, of.projection, None)
    rows = x.shape[0]
    values, gate = (projected[:, i * WIDTH : (i + 1) * WIDTH].view(rows, HEADS, DIM) for i in (0, 1))
    mixed = gated_rms_norm(values, gate, of.norm, eps=1e-5).view(rows, WIDTH)
    streams, x, post, mix = collapse(State(streams, linear(mixed, of.out, None), post, mix), of.sites[1])
    weights, _ = route(x, of.router, of.bias, **CHOICE)
    ids = of.ids[:rows]
    if seen is not None:
        seen.append(ids)
    named = {"weights": weights, "ids": ids, "num_shared": 1, "swiglu_limit": 10.0}
    return State(streams, moe.unsummed_experts(x, of.w13, of.w2, **named), post, mix)


def run(layers: list[Layer], x: torch.Tensor, seen: list[torch.Tensor] | None = None) -> State:
    state: State | torch.Tensor = x
    for of in layers * ROUNDS:
        state = through(state, of, seen)
    assert isinstance(state, State)
    return state


@contextmanager
def unstreamed() -> Iterator[None]:
    with patch.object(linear_operator, "stream_for", lambda *sizes: None):
        yield


@contextmanager
def library_linears() -> Iterator[None]:
    with unstreamed(), patch.object(linear_operator, "launch_for", lambda *sizes: None):
        yield


def bench(report: Report, layers: list[Layer], rows: int) -> None:
    x, seen = draw(rows, 4, HIDDEN), []
    want = settled(run(layers, x, seen).output).clone()
    touched = statistics.mean(len(ids.unique()) + 1 for ids in seen)
    small = 4 * HIDDEN * (EXPERTS + 2 * 24 * 4)
    floor = (2 * HIDDEN * (PROJECTED + WIDTH) + touched * EXPERT_BYTES + small) / BYTES_PER_US
    calls = LAYERS * ROUNDS
    whole = Shape(f"{calls} layers x {rows}", floor * calls, 1, 1)

    def not_finite() -> float:
        """Another product's rounding may choose other experts, so values are not compared between variants."""
        return 0.0 if bool(torch.isfinite(settled(run(layers, x).output)).all()) else float("inf")

    assert torch.equal(settled(run(layers, x).output), want), "not the same bits again"
    report.add(whole, "as it is", lambda _: run(layers, x), not_finite)
    with patch.object(moe, "unsummed_experts", moe.experts):
        assert torch.equal(settled(run(layers, x).output), want), "not the same bits with experts summed apart"
        report.add(whole, "experts summed apart", lambda _: run(layers, x), not_finite)
    with library_linears():
        report.add(whole, "linears by the library", lambda _: run(layers, x), not_finite)
    with unstreamed():
        report.add(whole, "no linear streamed", lambda _: run(layers, x), not_finite)


def compile_one(rows: int) -> None:
    """In a process of its own: fill Triton's cache on disk."""
    with torch.inference_mode():
        state = through(draw(rows, 4, HIDDEN), layer())
        through(state, layer())
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=out_file)
    options = parser.parse_args()
    torch.manual_seed(1)
    report, began = Report(out=options.out), time.monotonic()
    with ProcessPoolExecutor(min(6, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, ROWS))
    print(f"compiled after {time.monotonic() - began:.0f} s")
    with torch.inference_mode():
        layers = [layer() for _ in range(LAYERS)]
        for rows in ROWS:
            bench(report, layers, rows)
    report.show()
    seconds = round(time.monotonic() - began, 1)
    made = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "seconds": seconds, "rows": report.rows}
    keep(options.out, made)
    print(f"{made['device']}, {seconds} s")


if __name__ == "__main__":
    main()
