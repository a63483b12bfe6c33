"""Dense MLA of uniform decodes: against the reference in every tiling, on poisoned pages, with padding rows."""

from __future__ import annotations

import math

import pytest
import torch

from sidestream.ops.dense_mla import dense_mla, dense_mla_decode, reference
from sidestream.ops.kv_rows import KVRowLayout, kv_row_layout, pack_rows
from tests.ops.paged import PagedDecode, make_paged_decode
from tests.tolerances import BF16_OUTPUT, FP32_GEMM

SCALE = 0.2
LENGTHS = [17, 0, 1, 8, 50, 7, 9, 49, 0]


def run(
    step: PagedDecode, q: torch.Tensor, pool: torch.Tensor, layout: KVRowLayout, *, scratch_bytes: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return dense_mla_decode(
        q,
        pool,
        block_table=step.block_table,
        context_lens=step.context_lens,
        block_size=8,
        scale=SCALE,
        layout=layout,
        scratch_bytes=scratch_bytes,
    )


def plain(r: int, p: int, dtype: torch.dtype = torch.float32) -> KVRowLayout:
    return kv_row_layout("auto", latent_dim=r, rope_dim=p, model_dtype=dtype)


def check_padding(step: PagedDecode, out: torch.Tensor, lse: torch.Tensor) -> None:
    empty = step.context_lens == 0
    assert torch.equal(out[empty], torch.zeros_like(out[empty]))
    assert torch.equal(lse[empty], torch.full_like(lse[empty], -math.inf))
    assert out.isfinite().all()
    assert lse[~empty].isfinite().all()


@pytest.mark.parametrize(("r", "p", "heads"), [(16, 4, 3), (12, 0, 1)])
@pytest.mark.parametrize("scratch_bytes", [1, 9000, None])
def test_equals_the_reference(r: int, p: int, heads: int, scratch_bytes: int | None) -> None:
    step = make_paged_decode(LENGTHS, block_size=8, spare_columns=2)
    pool, q = step.paged.poisoned_pool(r + p), torch.randn(len(LENGTHS), heads, r + p)
    want_out, want_lse = reference.dense_mla_decode(
        q,
        pool,
        block_table=step.block_table,
        context_lens=step.context_lens,
        block_size=8,
        scale=SCALE,
        layout=plain(r, p),
    )
    out, lse = run(step, q, pool, plain(r, p), scratch_bytes=scratch_bytes)
    check_padding(step, out, lse)
    torch.testing.assert_close(out, want_out, rtol=0, atol=FP32_GEMM)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=FP32_GEMM)
    loud = torch.where(pool.isnan(), 1e30, pool)
    q[step.context_lens == 0] = torch.nan
    again = run(step, q, loud, plain(r, p), scratch_bytes=scratch_bytes)
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)


def test_tiles_merge_whatever_the_size_of_scores() -> None:
    """Maxima that rise and fall from tile to tile, far enough apart that exponentials under- and overflow."""
    step = make_paged_decode([50, 50, 1], block_size=8)
    pool, q = step.paged.poisoned_pool(20), torch.randn(3, 2, 20)
    for row, slope in ((0, 1.0), (1, -1.0)):
        where = step.paged.rows(row, torch.arange(50))
        pool[where] *= (1 + torch.arange(50) * slope % 50)[:, None] * 3
    out, lse = run(step, q, pool, plain(16, 4), scratch_bytes=1)
    for row, length in ((0, 50), (1, 50), (2, 1)):
        kv = pool[step.paged.rows(row, torch.arange(length))].double()
        scores = q[row].double() @ kv.t() * SCALE
        size = kv.abs().max()
        torch.testing.assert_close(
            out[row].double() / size, torch.softmax(scores, -1) @ kv[:, :16] / size, rtol=0, atol=FP32_GEMM
        )
        want = torch.logsumexp(scores, -1)
        torch.testing.assert_close(lse[row].double() / size, want / size, rtol=0, atol=FP32_GEMM)


def test_equals_the_operator_of_mixed_steps() -> None:
    step = make_paged_decode([17, 1, 50, 30], block_size=8)
    pool, q = step.paged.poisoned_pool(20), torch.randn(4, 3, 20)
    want = dense_mla(
        q,
        pool,
        block_table=step.block_table,
        segments=step.paged.segments,
        num_decode=4,
        block_size=8,
        scale=SCALE,
        layout=plain(16, 4),
    )
    for got, other in zip(run(step, q, pool, plain(16, 4)), want, strict=True):
        torch.testing.assert_close(got, other, rtol=0, atol=FP32_GEMM)


@pytest.mark.parametrize(("name", "p"), [("fp8_ds_mla", 4), ("mxfp8", 0), ("bf16", 4)])
def test_stored_formats(name: str, p: int) -> None:
    layout = kv_row_layout(name, latent_dim=32, rope_dim=p, model_dtype=torch.float32)
    step = make_paged_decode([19, 12, 0], block_size=8)
    rows = step.paged.poisoned_pool(32 + p)
    pool = pack_rows(rows[:, :32], rows[:, 32:] if p else None, layout)
    q = torch.randn(3, 2, 32 + p)
    out, lse = run(step, q, pool, layout, scratch_bytes=5000)
    check_padding(step, out, lse)
    want_out, want_lse = reference.dense_mla_decode(
        q,
        pool,
        block_table=step.block_table,
        context_lens=step.context_lens,
        block_size=8,
        scale=SCALE,
        layout=layout,
    )
    torch.testing.assert_close(out, want_out, rtol=0, atol=FP32_GEMM)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=FP32_GEMM)


def test_bf16_and_strides() -> None:
    step = make_paged_decode([19, 30, 0], block_size=8)
    pool = step.paged.poisoned_pool(20, torch.bfloat16)
    q = torch.randn(2, 3, 20).bfloat16().transpose(0, 1)
    out, lse = run(step, q, pool, plain(16, 4, torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    want, _ = run(step, q.float(), pool.float(), plain(16, 4))
    torch.testing.assert_close(out.float(), want, rtol=BF16_OUTPUT, atol=FP32_GEMM)
    wide = torch.full((3, 2, 40), torch.nan).bfloat16()
    wide[:, :, ::2] = q
    short = PagedDecode(step.paged, step.context_lens, step.block_table.to(torch.int32))
    strided, _ = run(short, wide[:, :, ::2], pool, plain(16, 4, torch.bfloat16))
    assert torch.equal(strided, out)
