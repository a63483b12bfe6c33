"""Run by ``test_stream_launches.py`` in a process of its own: it pretends that there is a GPU, and compiles for it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.kernel_resources import resources_of
from benchmarks.precompile import begin
from benchmarks.rehearsal import kernels_met, pretended_device
from sidestream.ops.linear.launches import Stream

LAUNCHES = (Stream(16, 2, 16, splits=4), Stream(32, 3, 64), Stream(64, 4, 64))
"""Those without splits with a bias."""


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def main() -> None:
    with pretended_device(), kernels_met(lambda: "") as found:
        from sidestream.ops.linear import triton_stream

        for launch in LAUNCHES:
            depth = launch.steps * launch.splits * 64
            x, bias = made(launch.rows, depth + 64)[:, :depth], made(4096) if launch.splits == 1 else None
            assert triton_stream.takes(x)
            triton_stream.linear(x, made(4096, depth), bias, launch=launch)
    begin()
    kernels = [kernel for kernel in found.values() if kernel.name.endswith("._stream")]
    print(json.dumps([asdict(resources_of(kernel)) for kernel in kernels]))


if __name__ == "__main__":
    main()
