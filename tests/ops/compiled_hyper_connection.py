"""Run by ``test_compiled_hyper_connection.py`` in a process of its own: it pretends that there is a GPU, and compiles
for it."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.kernel_resources import resources_of
from benchmarks.precompile import begin
from benchmarks.rehearsal import kernels_met, pretended_device
from sidestream.ops.triton_rounding import narrowed

SIZES = ((1, 64), (1, 128), (3, 64), (3, 512), (17, 64), (520, 64), (1, 4096))
"""Rows and columns a stream: the fewest that each way of launching takes, and a real model's."""


@triton.jit  # type: ignore[untyped-decorator]
def narrow(x: tl.tensor, out: tl.tensor, COUNT: tl.constexpr) -> None:
    at = tl.arange(0, COUNT)
    tl.store(out + at, narrowed(tl.load(x + at), tl.bfloat16, True))


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def of_counts() -> None:
    for count in (1, 2, 64):
        narrow[(1,)](made(count, dtype=torch.float32), made(count), count)


def between_sublayers(rows: int, hidden: int) -> None:
    import sidestream.ops.hyper_connection as operator

    streams, norm_weight = made(rows, 4, hidden), made(2, hidden)
    fn, base = made(24, 4 * hidden, dtype=torch.float32), made(24, dtype=torch.float32)
    post, mix = made(rows, 4, 1, dtype=torch.float32), made(rows, 4, 4, dtype=torch.float32)
    settings: dict[str, Any] = {"norm_weight": norm_weight, "norm_eps": 1e-5, "eps": 1e-6, "iters": 20}
    operator._post_pre(streams, made(rows, hidden), post, fn, base, mix=mix, **settings)
    operator._pre(streams, fn, base, **settings)


def sums(rows: int) -> None:
    """Of eight experts and a shared one, by themselves and while streams are mixed."""
    from sidestream.ops.hyper_connection import triton_post, triton_post_pre
    from sidestream.ops.moe import ExpertSum, triton_sum

    partial, weights = made(rows * 9, 4096, dtype=torch.float32), made(rows, 8, dtype=torch.float32)
    pending = ExpertSum(partial, weights, made(rows, 8, dtype=torch.int64), 1, torch.bfloat16)
    streams, fn = made(rows, 4, 4096), made(24, 4 * 4096, dtype=torch.float32)
    post, mix = made(rows, 4, 1, dtype=torch.float32), made(rows, 4, 4, dtype=torch.float32)
    triton_sum.summed(pending, pdl=True)
    if rows > triton_post_pre.MOST_ROWS:
        triton_post.hyper_connection_post(streams, pending, post, mix=mix)
    else:
        launch = triton_post_pre.launch_for(rows, 4096)
        triton_post_pre.mixed(streams, pending, post, fn, mix=mix, launch=launch)


def main() -> None:
    stage = "counts"
    with pretended_device(), kernels_met(lambda: stage) as met:
        of_counts()
        for rows, hidden in SIZES:
            stage = f"{rows} {hidden}"
            between_sublayers(rows, hidden)
        for rows in (2, 8, 64):
            stage = f"sums of {rows}"
            sums(rows)
    begin()
    compiled = []
    for kernel in met.values():
        module, _, name = kernel.name.rpartition(".")
        ptx = getattr(import_module(module), name).preload(kernel.data).asm["ptx"]
        spilled = resources_of(kernel).code.spilled if kernel.stage.startswith("sums") else None
        pairs, singles = (ptx.count(f"cvt.rn.{kind}.f32") for kind in ("bf16x2", "bf16"))
        compiled.append({"name": name, "size": kernel.stage, "pairs": pairs, "singles": singles, "spilled": spilled})
    print(json.dumps(compiled))


if __name__ == "__main__":
    import_module("tests.ops.compiled_hyper_connection").main()  # kernels are found again by the name of their module
