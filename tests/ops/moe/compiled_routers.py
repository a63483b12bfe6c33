"""Run by ``test_triton_moe.py`` in a process of its own: it pretends that there is a GPU, and compiles for it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.kernel_resources import resources_of
from benchmarks.precompile import begin
from benchmarks.rehearsal import kernels_met, pretended_device
from sidestream.ops.moe.triton_tiles import FEW_EXPERTS, FEW_EXPERTS_TILES, MANY_EXPERTS, MANY_EXPERTS_TILES

CHOICE: dict[str, Any] = {"top_k": 8, "norm_topk_prob": True, "scale": 2.5}


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def main() -> None:
    from sidestream.ops.moe import triton_route

    with pretended_device(), kernels_met(lambda: "") as found:
        for experts, table in ((FEW_EXPERTS, FEW_EXPERTS_TILES[1:]), (MANY_EXPERTS, MANY_EXPERTS_TILES[2:])):
            weight, bias = made(experts, 4096), made(experts)
            for tokens, tiles in table:
                x = made(tokens, 4096, dtype=torch.bfloat16)
                triton_route.route(x, weight, bias, **CHOICE, num_groups=8, topk_groups=4, tiles=tiles)
    begin()
    print(json.dumps([asdict(resources_of(kernel)) for kernel in found.values()]))


if __name__ == "__main__":
    main()
