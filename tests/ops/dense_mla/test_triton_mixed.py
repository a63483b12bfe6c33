"""Triton dense MLA of mixed and prefill steps: against the reference, on shuffled poisoned pages, in any cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from sidestream.ops.dense_mla import reference
from sidestream.ops.kv_rows import KVRowLayout, kv_row_layout, pack_rows
from tests.ops.dense_mla.test_dense_mla import BATCHES
from tests.ops.paged import Paged, make_paged
from tests.ops.triton_mode import DEVICE, INTERPRETED
from tests.tolerances import BF16_STEPS, FP32_GEMM

triton_launch = pytest.importorskip("sidestream.ops.sparse_mla.triton_launch")
triton_mixed = pytest.importorskip("sidestream.ops.dense_mla.triton_mixed")

SCALE = 0.2
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
LAUNCH = triton_launch.Launch(splits=1, block_h=16, block_n=16, stages=2, warps=4, parted=False)


def run(
    paged: Paged, q: torch.Tensor, pool: torch.Tensor, layout: KVRowLayout, *, num_decode: int, **change: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = triton_mixed.dense_mla(
        q.to(DEVICE),
        pool.to(DEVICE),
        block_table=paged.block_table.to(DEVICE),
        segments=paged.segments,
        num_decode=num_decode,
        block_size=8,
        scale=SCALE,
        layout=layout,
        launch=replace(LAUNCH, **change) if change else None,
    )
    return out.cpu(), lse.cpu()


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    if INTERPRETED:
        torch.testing.assert_close(got.float(), want, rtol=0, atol=FP32_GEMM)
        return
    assert (got.float() - want).abs().max() <= BF16_STEPS * want.abs().max()


def case(spans: Sequence[tuple[int, int]], layout: KVRowLayout, heads: int) -> tuple[Paged, torch.Tensor, torch.Tensor]:
    paged = make_paged(spans, block_size=8)
    r, p = layout.latent_dim, layout.rope_dim
    plain = paged.poisoned_pool(r + p)
    pool = pack_rows(plain[:, :r], plain[:, r:] if p else None, layout)
    return paged, torch.randn(paged.num_tokens, heads, r + p).to(DTYPE), pool


@pytest.mark.parametrize(("name", "p", "heads"), [("auto", 16, 3), ("mxfp8", 0, 20)])
@pytest.mark.parametrize(("spans", "num_decode"), BATCHES)
def test_equals_the_reference(spans: Sequence[tuple[int, int]], num_decode: int, name: str, p: int, heads: int) -> None:
    layout = kv_row_layout(name, latent_dim=32, rope_dim=p, model_dtype=DTYPE)
    paged, q, pool = case(spans, layout, heads)
    want_out, want_lse = reference.dense_mla(
        q,
        pool,
        block_table=paged.block_table,
        segments=paged.segments,
        num_decode=num_decode,
        block_size=8,
        scale=SCALE,
        layout=layout,
    )
    for decodes, change in (
        (num_decode, {}),
        (0, {"splits": 3}),
        (num_decode, {"splits": 1, "block_h": 32}),
    ):
        out, lse = run(paged, q, pool, layout, num_decode=decodes, **change)
        check(out, want_out)
        check(lse, want_lse)


def test_rows_behind_a_token_change_nothing() -> None:
    """A chunk's later tokens share a block with earlier ones and must not reach them; nor do rows behind the chunk."""
    layout = kv_row_layout("auto", latent_dim=32, rope_dim=0, model_dtype=DTYPE)
    paged, q, pool = case([(13, 20), (0, 9)], layout, 3)
    out, lse = run(paged, q, pool, layout, num_decode=0, splits=1)
    q[12:20], q[25:] = 1e4, 1e4
    pool[paged.rows(0, torch.arange(25, 33))] = 1e4
    pool[paged.rows(1, torch.arange(5, 9))] = 1e4
    again, again_lse = run(paged, q, pool, layout, num_decode=0, splits=1)
    for same in (slice(0, 12), slice(20, 25)):
        assert torch.equal(again[same], out[same])
        assert torch.equal(again_lse[same], lse[same])
    assert not torch.equal(again[12:20], out[12:20])


def test_padding_rows_are_finite() -> None:
    layout = kv_row_layout("auto", latent_dim=32, rope_dim=0, model_dtype=DTYPE)
    paged, q, pool = case([(9, 1), (0, 3)], layout, 2)
    q = torch.cat([q, torch.full((2, 2, 32), torch.nan, dtype=DTYPE)])
    out, lse = run(paged, q, pool, layout, num_decode=1, splits=2)
    assert torch.equal(out[4:], torch.zeros_like(out[4:]))
    assert torch.equal(lse[4:], torch.full((2, 2), -math.inf))
    assert out[:4].isfinite().all()


def test_what_the_kernels_do_not_support_runs_in_torch() -> None:
    layout = kv_row_layout("auto", latent_dim=24, rope_dim=4, model_dtype=torch.float32)
    paged, q, pool = case([(9, 1), (4, 7)], layout, 2)
    out, lse = run(paged, q.float(), pool, layout, num_decode=1)
    want_out, want_lse = reference.dense_mla(
        q,
        pool,
        block_table=paged.block_table,
        segments=paged.segments,
        num_decode=1,
        block_size=8,
        scale=SCALE,
        layout=layout,
    )
    torch.testing.assert_close(out, want_out, rtol=0, atol=FP32_GEMM)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=FP32_GEMM)
