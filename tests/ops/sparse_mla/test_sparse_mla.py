"""Sparse MLA: against a per-head reference and a dense softmax, in poisoned pools, for every row format."""

from __future__ import annotations

import math

import pytest
import torch

from sidestream.ops.kv_rows import KVRowLayout, kv_row_layout, pack_rows
from sidestream.ops.sparse_mla import reference, sparse_mla
from tests.tolerances import BF16_OUTPUT, FP32_GEMM

POOL_ROWS, SCALE = 300, 0.2


def draw_rows(tokens: int, width: int, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct rows a token, row 0 never among them."""
    rows = torch.full((tokens, width), -1)
    for t, count in enumerate(counts):
        rows[t, :count] = torch.randperm(POOL_ROWS - 1)[:count] + 1
    return rows, torch.tensor(counts, dtype=torch.int32)


def poisoned(layout: KVRowLayout, rows: torch.Tensor) -> torch.Tensor:
    """A pool that is NaN wherever no token selected a row, row 0 included."""
    if layout.tile:
        pool = torch.full((POOL_ROWS, layout.row_elems), 0x7F, dtype=torch.uint8)  # E4M3 NaN
        if layout.name == "mxfp8":
            pool.fill_(0xFF)
    else:
        pool = torch.full((POOL_ROWS, layout.row_elems), torch.nan, dtype=layout.dtype)
    used = rows[rows >= 0].unique().long()
    rope = torch.randn(len(used), layout.rope_dim) if layout.rope_dim else None
    pool[used] = pack_rows(torch.randn(len(used), layout.latent_dim), rope, layout)
    return pool


def check(q: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, layout: KVRowLayout) -> None:
    want_out, want_lse = reference.sparse_mla(q, pool, rows, counts=counts, scale=SCALE, layout=layout)
    for scratch_bytes in (1, 30_000, 4 << 20):
        out, lse = sparse_mla(q, pool, rows, counts=counts, scale=SCALE, layout=layout, scratch_bytes=scratch_bytes)
        assert out.dtype == q.dtype
        assert lse.dtype == torch.float32
        torch.testing.assert_close(out.float(), want_out, rtol=0, atol=FP32_GEMM)
        assert lse is not None
        torch.testing.assert_close(lse, want_lse, rtol=0, atol=FP32_GEMM)
        alone, nothing = sparse_mla(
            q, pool, rows, counts=counts, scale=SCALE, layout=layout, with_lse=False, scratch_bytes=scratch_bytes
        )
        assert torch.equal(alone, out)
        assert nothing is None


@pytest.mark.parametrize("heads", [1, 3, 8, 128])
@pytest.mark.parametrize(("r", "p"), [(16, 4), (32, 0)])
def test_equals_the_reference(heads: int, r: int, p: int) -> None:
    layout = kv_row_layout("auto", latent_dim=r, rope_dim=p, model_dtype=torch.float32)
    counts = [11, 0, 1, 10, 5, 0, 11]
    rows, count = draw_rows(7, 11, counts)
    check(torch.randn(7, heads, r + p), poisoned(layout, rows), rows, count, layout)


@pytest.mark.parametrize(("name", "p"), [("bf16", 4), ("fp8_ds_mla", 4), ("fp8_ds_mla", 0), ("mxfp8", 0)])
def test_stored_formats(name: str, p: int) -> None:
    layout = kv_row_layout(name, latent_dim=64, rope_dim=p, model_dtype=torch.float32)
    rows, counts = draw_rows(5, 9, [9, 3, 0, 1, 8])
    check(torch.randn(5, 4, 64 + p), poisoned(layout, rows), rows, counts, layout)


def test_rows_without_entries() -> None:
    layout = kv_row_layout("auto", latent_dim=16, rope_dim=0, model_dtype=torch.float32)
    rows, counts = draw_rows(4, 6, [0, 0, 0, 0])
    pool = torch.full((POOL_ROWS, 16), torch.nan)
    out, lse = sparse_mla(torch.randn(4, 2, 16), pool, rows, counts=counts, scale=SCALE, layout=layout)
    assert torch.equal(out, torch.zeros(4, 2, 16))
    assert torch.equal(lse, torch.full((4, 2), -math.inf))


def test_all_rows_selected_equal_dense_softmax() -> None:
    layout = kv_row_layout("auto", latent_dim=24, rope_dim=8, model_dtype=torch.float32)
    pool, q = torch.randn(50, 32), torch.randn(3, 5, 32)
    rows = torch.stack([torch.randperm(50) for _ in range(3)]).to(torch.int32)
    out, lse = sparse_mla(q, pool, rows, counts=torch.full((3,), 50, dtype=torch.int32), scale=SCALE, layout=layout)
    scores = torch.einsum("thd,nd->thn", q.double(), pool.double()) * SCALE
    want = torch.softmax(scores, dim=-1) @ pool[:, :24].double()
    torch.testing.assert_close(out.double(), want, rtol=0, atol=FP32_GEMM)
    torch.testing.assert_close(lse.double(), torch.logsumexp(scores, dim=-1), rtol=0, atol=FP32_GEMM)


def test_large_scores_do_not_overflow() -> None:
    layout = kv_row_layout("auto", latent_dim=8, rope_dim=0, model_dtype=torch.float32)
    rows, counts = draw_rows(2, 7, [7, 4])
    pool, q = poisoned(layout, rows), torch.randn(2, 3, 8) * 1e4
    out, lse = sparse_mla(q, pool, rows, counts=counts, scale=1.0, layout=layout)
    want_out, want_lse = reference.sparse_mla(q, pool, rows, counts=counts, scale=1.0, layout=layout)
    torch.testing.assert_close(out, want_out, rtol=FP32_GEMM, atol=1e-2)  # scores of 1e4 carry errors of 1e-3
    torch.testing.assert_close(lse, want_lse, rtol=FP32_GEMM, atol=0)


def test_a_bad_token_stays_alone() -> None:
    layout = kv_row_layout("auto", latent_dim=8, rope_dim=0, model_dtype=torch.float32)
    rows, counts = draw_rows(6, 5, [5] * 6)
    pool, q = poisoned(layout, rows), torch.randn(6, 2, 8)
    clean, _ = sparse_mla(q, pool, rows, counts=counts, scale=SCALE, layout=layout)
    q[3] = torch.nan
    dirty, _ = sparse_mla(q, pool, rows, counts=counts, scale=SCALE, layout=layout)
    others = [0, 1, 2, 4, 5]
    assert torch.equal(dirty[others], clean[others])


def test_bf16_queries_and_strides() -> None:
    layout = kv_row_layout("auto", latent_dim=16, rope_dim=4, model_dtype=torch.bfloat16)
    rows, counts = draw_rows(4, 6, [6, 2, 0, 5])
    pool = poisoned(layout, rows)
    q = torch.randn(3, 4, 20).bfloat16().transpose(0, 1)
    wide = torch.full((8, 13), 10**6)
    wide[::2, 1::2] = rows
    out, lse = sparse_mla(q, pool, wide[::2, 1::2], counts=counts.repeat_interleave(2)[::2], scale=SCALE, layout=layout)
    want_out, want_lse = reference.sparse_mla(q, pool, rows, counts=counts, scale=SCALE, layout=layout)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), want_out, rtol=BF16_OUTPUT, atol=FP32_GEMM)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=FP32_GEMM)


def test_no_tokens() -> None:
    layout = kv_row_layout("auto", latent_dim=16, rope_dim=4, model_dtype=torch.float32)
    out, lse = sparse_mla(
        torch.randn(0, 3, 20),
        torch.randn(9, 20),
        torch.zeros(0, 5, dtype=torch.int64),
        counts=torch.zeros(0, dtype=torch.int32),
        scale=SCALE,
        layout=layout,
    )
    assert (out.shape, lse.shape) == ((0, 3, 16), (0, 3))
