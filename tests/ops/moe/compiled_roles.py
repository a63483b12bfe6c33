"""Run by ``test_expert_roles.py`` in a process of its own: it pretends that there is a GPU, and compiles for it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.kernel_resources import resources_of
from benchmarks.precompile import begin
from benchmarks.rehearsal import kernels_met, pretended_device
from sidestream.ops.moe.triton_tiles import ROLES


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def main() -> None:
    from sidestream.ops.moe import triton_expert_roles, triton_grouped

    with pretended_device(), kernels_met(lambda: "") as found:
        x = made(2048, 4104)[:, :4096]  # rows are not a multiple of 16 elements apart
        w13, w2 = made(9, 4096, 4096), made(9, 4096, 2048)
        chosen = {"weights": made(2048, 8, dtype=torch.float32), "ids": made(2048, 8, dtype=torch.int64)}
        for limit in (10.0, None):
            triton_grouped.experts(x, w13, w2, **chosen, num_shared=1, swiglu_limit=limit, tiles=ROLES)
    begin()
    compiled = []
    for kernel in found.values():
        if kernel.name.endswith(".products"):
            text = triton_expert_roles.products.preload(kernel.data).asm["ptx"]
            waits = re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+);", text)
            compiled.append(asdict(resources_of(kernel)) | {"waits": waits})
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
