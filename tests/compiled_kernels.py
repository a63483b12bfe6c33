"""Run by ``test_kernel_resources.py`` in a process of its own: it pretends that there is a GPU, and compiles for it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.kernel_resources import resources_of
from benchmarks.precompile import begin
from benchmarks.rehearsal import kernels_met, pretended_device


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def launch() -> None:
    """Each in the form that had worse code."""
    from sidestream.ops.indexer.triton_decode import paged_scores, score_plan
    from sidestream.ops.kv_rows import kv_row_layout
    from sidestream.ops.moe.triton_one_token import experts
    from sidestream.ops.moe.triton_swiglu import swiglu
    from sidestream.ops.moe.triton_tiles import ONE_TOKEN
    from sidestream.ops.rope.triton_rope import apply_rope
    from sidestream.ops.sparse_mla.triton_impl import sparse_mla

    angles = made(64, 32, dtype=torch.float32)
    swiglu(made(64, 4096), limit=None)
    apply_rope(made(64, 64, 64), angles, angles, interleaved=True)
    layout = kv_row_layout("fp8_ds_mla", latent_dim=512, rope_dim=64, model_dtype=torch.bfloat16)
    pool = made(4096, layout.row_elems, dtype=layout.dtype)
    counts, rows = made(128, dtype=torch.int32), made(128, 2048, dtype=torch.int64)
    sparse_mla(made(128, 64, 576), pool, rows, counts=counts, scale=1.0, layout=layout)
    w13, w2 = made(65, 4096, 4096), made(65, 4096, 2048)
    chosen: dict[str, Any] = {"weights": made(1, 8, dtype=torch.float32), "ids": made(1, 8, dtype=torch.int64)}
    experts(made(1, 4096), w13, w2, **chosen, num_shared=1, swiglu_limit=None, tiles=ONE_TOKEN)
    angles = made(64, 32, dtype=torch.float32)
    paged_scores(
        made(64, 64, 128), made(64, 64, dtype=torch.float32), made(512, 64, 128), picks=2048, kpool=1,
        block_table=made(64, 128, dtype=torch.int64), context_lens=made(64, dtype=torch.int64), tickets=None,
        plan=score_plan(64, 8192, 64), cos=angles, sin=angles,
    )  # fmt: skip


WANTED = {"_swiglu", "_rotate", "_gate_up_one", "_scores_kernel", "attend_roles"}


def main() -> None:
    with pretended_device(), kernels_met(lambda: "") as found:
        launch()
    begin()
    kernels = {kernel.name.rpartition(".")[2]: kernel for kernel in found.values()}
    print(json.dumps({name: asdict(resources_of(kernels[name])) for name in sorted(WANTED)}))


if __name__ == "__main__":
    main()
