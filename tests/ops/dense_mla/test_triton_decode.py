"""Triton dense MLA of uniform decodes: against the reference on poisoned pages, with padding rows, in any cut."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sidestream.ops.dense_mla import reference
from sidestream.ops.kv_rows import KVRowLayout, kv_row_layout, pack_rows
from tests.ops.paged import PagedDecode, make_paged_decode
from tests.ops.triton_mode import DEVICE, INTERPRETED
from tests.tolerances import BF16_STEPS, FP32_GEMM

triton_launch = pytest.importorskip("sidestream.ops.sparse_mla.triton_launch")
triton_decode = pytest.importorskip("sidestream.ops.dense_mla.triton_decode")

SCALE, LENGTHS = 0.2, [17, 0, 1, 8, 50, 7, 33]
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
LAUNCH = triton_launch.Launch(splits=1, block_h=16, block_n=16, stages=2, warps=4, parted=False)


def run(
    step: PagedDecode, q: torch.Tensor, pool: torch.Tensor, layout: KVRowLayout, *, splits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = triton_decode.dense_mla_decode(
        q.to(DEVICE),
        pool.to(DEVICE),
        block_table=step.block_table.to(DEVICE),
        context_lens=step.context_lens.to(DEVICE),
        block_size=8,
        scale=SCALE,
        layout=layout,
        launch=replace(LAUNCH, splits=splits),
    )
    return out.cpu(), lse.cpu()


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    if INTERPRETED:
        torch.testing.assert_close(got.float(), want, rtol=0, atol=FP32_GEMM)
        return
    infinite = want.isinf()
    assert torch.equal(got.float()[infinite], want[infinite])
    assert (got.float() - want)[~infinite].abs().max() <= BF16_STEPS * want[~infinite].abs().max()


@pytest.mark.parametrize(("name", "p"), [("auto", 16), ("bf16", 0), ("fp8_ds_mla", 16), ("mxfp8", 0)])
@pytest.mark.parametrize("splits", [1, 3])
def test_equals_the_reference(name: str, p: int, splits: int) -> None:
    layout = kv_row_layout(name, latent_dim=32, rope_dim=p, model_dtype=DTYPE)
    step = make_paged_decode(LENGTHS, block_size=8, spare_columns=2)
    plain = step.paged.poisoned_pool(32 + p)
    pool = pack_rows(plain[:, :32], plain[:, 32:] if p else None, layout)
    q = torch.randn(len(LENGTHS), 3, 32 + p).to(DTYPE)
    out, lse = run(step, q, pool, layout, splits=splits)
    want_out, want_lse = reference.dense_mla_decode(
        q,
        pool,
        block_table=step.block_table,
        context_lens=step.context_lens,
        block_size=8,
        scale=SCALE,
        layout=layout,
    )
    check(out, want_out)
    check(lse, want_lse)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(lse[1], torch.full((3,), -math.inf))


def test_rows_behind_a_context_change_nothing() -> None:
    layout = kv_row_layout("auto", latent_dim=32, rope_dim=0, model_dtype=DTYPE)
    step = make_paged_decode([17, 0, 41], block_size=8)
    pool, q = step.paged.poisoned_pool(32, DTYPE), torch.randn(3, 2, 32).to(DTYPE)
    out, lse = run(step, q, pool, layout, splits=2)
    q[1] = torch.nan
    loud = torch.where(pool.isnan(), torch.tensor(1e30, dtype=DTYPE), pool)
    short = PagedDecode(step.paged, step.context_lens, step.block_table.to(torch.int32))
    again = run(short, q, loud, layout, splits=2)
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)
