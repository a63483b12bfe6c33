"""Run by ``test_expert_roles.py`` in a process of its own: it pretends that there is a GPU, and compiles for it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.kernel_resources import resources_of
from benchmarks.precompile import begin
from benchmarks.rehearsal import kernels_met, pretended_device
from sidestream.ops.moe.triton_tiles import MANY_ROWS, ROLES, Roles


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def main() -> None:
    from sidestream.ops.moe import triton_grouped

    with pretended_device(), kernels_met(lambda: "") as found:
        x = made(2048, 4104)[:, :4096]  # rows are not a multiple of 16 elements apart
        w13, w2 = made(9, 4096, 4096), made(9, 4096, 2048)
        chosen = {"weights": made(2048, 8, dtype=torch.float32), "ids": made(2048, 8, dtype=torch.int64)}
        for roles in (ROLES, Roles(lead=0, early=True), Roles(lead=1, asks=True, early=True)):
            tiles = MANY_ROWS.with_roles(roles)
            triton_grouped.experts(x, w13, w2, **chosen, num_shared=1, swiglu_limit=10.0, tiles=tiles)
    begin()
    kernels = [kernel for kernel in found.values() if kernel.name.endswith(".products")]
    print(json.dumps([asdict(resources_of(kernel)) for kernel in kernels]))


if __name__ == "__main__":
    main()
