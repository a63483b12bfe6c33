"""Run by ``test_compiled_sums.py`` in a process of its own: it pretends that there is a GPU, and compiles for it."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.precompile import begin
from benchmarks.rehearsal import kernels_met, pretended_device
from sidestream.core.ring import RingPlan
from sidestream.ops.moe.triton_tiles import EXPERT_TILES, RouterTiles

FP32 = torch.float32
COMPILED = {"bare_products", "_scores", "_pool_kernel", "_write_pools_kernel", "_gate_up", "_down"}


@triton.jit  # type: ignore[untyped-decorator]
def bare_products(a: tl.tensor, b: tl.tensor, out: tl.tensor) -> None:
    """What must be found: threads of a warp have one product each."""
    lane, row = tl.arange(0, 32)[None, :], tl.arange(0, 4)
    total = tl.sum(tl.load(a + row[:, None] * 32 + lane) * tl.load(b + lane), 1)
    tl.store(out + row, total)


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def route() -> None:
    from sidestream.ops.moe import triton_route

    choice: dict[str, Any] = {"top_k": 4, "num_groups": 1, "topk_groups": 1, "norm_topk_prob": True, "scale": 2.5}
    for dtype in (FP32, torch.bfloat16):
        for tiles in (RouterTiles(4, 4, 32, 2, 4, 1, dot=False), RouterTiles(1, 2, 1024, 4, 4, 1, dot=False)):
            depth = tiles.depth * tiles.splits
            weight, bias = made(24, depth, dtype=FP32), made(24, dtype=FP32)
            triton_route.route(made(5, depth, dtype=dtype), weight, bias, **choice, tiles=tiles)


def pools() -> None:
    from sidestream.ops.indexer import triton_keys, triton_pools

    carry, window, token = (made(size, dtype=torch.int64) for size in (12, 16, 4))
    plan = RingPlan(4, 3, carry, window.view(4, 4), token, token)
    k, gate, ape, tail, norm = made(4, 32), made(4, 32), made(4, 32), made(9, 64), made(32)
    triton_pools.pool_keys(k, gate, ape, tail=tail, plan=plan, pools=token)
    named: dict[str, Any] = {"tail": tail, "plan": plan, "entries": token, "keys_flat": made(64, 32)}
    triton_keys.write_pools(k, gate, ape, norm_weight=norm, norm_bias=norm, **named)


def experts() -> None:
    from sidestream.ops.moe import triton_grouped

    x, w13, w2 = made(2, 64, dtype=FP32), made(8, 64, 64, dtype=FP32), made(8, 64, 32, dtype=FP32)
    chosen: dict[str, Any] = {"weights": made(2, 3, dtype=FP32), "ids": made(2, 3, dtype=torch.int64)}
    triton_grouped.experts(x, w13, w2, **chosen, num_shared=0, swiglu_limit=None, tiles=EXPERT_TILES[0][1])


def bare() -> None:
    bare_products[(1,)](made(4, 32, dtype=FP32), made(32, dtype=FP32), made(4, dtype=FP32))


def main() -> None:
    with pretended_device(), kernels_met(lambda: "") as found:
        for launch in (bare, route, pools, experts):
            launch()
    begin()
    compiled = []
    for kernel in found.values():
        module, _, name = kernel.name.rpartition(".")
        if name in COMPILED:
            compiled.append((name, getattr(import_module(module), name).preload(kernel.data).asm["ptx"]))
    print(json.dumps(compiled))


if __name__ == "__main__":
    import_module("tests.ops.compiled_sums").main()  # kernels are found again by the name of their module
