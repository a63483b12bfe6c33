"""Dense MLA: against the reference and a plain causal softmax, on shuffled poisoned pages, in every batch shape."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from sidestream.ops.dense_mla import dense_mla, reference
from sidestream.ops.kv_rows import kv_row_layout, pack_rows
from tests.ops.paged import Paged, make_paged
from tests.tolerances import BF16_OUTPUT, FP32_GEMM

SCALE = 0.2
BATCHES: list[tuple[Sequence[tuple[int, int]], int]] = [
    ([(0, 30)], 0),
    ([(13, 20), (0, 1), (0, 9)], 0),
    ([(17, 1), (50, 1), (3, 1), (0, 1)], 4),
    ([(16, 1), (16, 1)], 2),
    ([(17, 3), (40, 3), (0, 21), (24, 8)], 2),
]


def run(
    paged: Paged, q: torch.Tensor, pool: torch.Tensor, *, num_decode: int, r: int, scratch_bytes: int = 4 << 20
) -> tuple[torch.Tensor, torch.Tensor]:
    layout = kv_row_layout("auto", latent_dim=r, rope_dim=pool.shape[1] - r, model_dtype=pool.dtype)
    return dense_mla(
        q,
        pool,
        block_table=paged.block_table,
        segments=paged.segments,
        num_decode=num_decode,
        block_size=paged.block_size,
        scale=SCALE,
        layout=layout,
        scratch_bytes=scratch_bytes,
    )


@pytest.mark.parametrize(("r", "p", "heads"), [(16, 4, 3), (12, 0, 1)])
@pytest.mark.parametrize(("spans", "num_decode"), BATCHES)
def test_equals_the_reference(spans: Sequence[tuple[int, int]], num_decode: int, r: int, p: int, heads: int) -> None:
    paged = make_paged(spans, block_size=8)
    pool, q = paged.poisoned_pool(r + p), torch.randn(paged.num_tokens, heads, r + p)
    layout = kv_row_layout("auto", latent_dim=r, rope_dim=p, model_dtype=torch.float32)
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
    for decodes in {num_decode, 0}:
        for scratch_bytes in (1, 4000, 4 << 20):
            out, lse = run(paged, q, pool, num_decode=decodes, r=r, scratch_bytes=scratch_bytes)
            torch.testing.assert_close(out, want_out, rtol=0, atol=FP32_GEMM)
            torch.testing.assert_close(lse, want_lse, rtol=0, atol=FP32_GEMM)


def test_is_causal_softmax() -> None:
    paged = make_paged([(0, 25)], block_size=4)
    pool, q = paged.poisoned_pool(20), torch.randn(25, 3, 20)
    out, lse = run(paged, q, pool, num_decode=0, r=14)
    kv = pool[paged.rows(0, torch.arange(25))].double()
    scores = torch.einsum("thd,nd->thn", q.double(), kv) * SCALE
    scores.masked_fill_(torch.ones(25, 25, dtype=torch.bool).triu(1)[:, None], -math.inf)
    torch.testing.assert_close(out.double(), torch.softmax(scores, -1) @ kv[:, :14], rtol=0, atol=FP32_GEMM)
    torch.testing.assert_close(lse.double(), torch.logsumexp(scores, -1), rtol=0, atol=FP32_GEMM)


def test_chunks_and_decode_continue_a_prefill() -> None:
    paged = make_paged([(0, 23)], block_size=4)
    pool, q = paged.poisoned_pool(20), torch.randn(23, 3, 20)
    want, _ = run(paged, q, pool, num_decode=0, r=16)
    for chunk, num_decode in ((1, 1), (1, 0), (5, 0), (7, 0), (2, 1)):
        for start in range(0, 23, chunk):
            length = min(chunk, 23 - start)
            part = Paged(
                block_size=4,
                num_blocks=paged.num_blocks,
                segments=(type(paged.segments[0])(0, length, 0, start),),
                block_table=paged.block_table,
                positions=paged.positions[start : start + length],
                token_rows=paged.token_rows[start : start + length],
            )
            out, _ = run(part, q[start : start + length], pool, num_decode=num_decode, r=16)
            torch.testing.assert_close(out, want[start : start + length], rtol=0, atol=FP32_GEMM)


def test_padding_rows_are_finite() -> None:
    paged = make_paged([(9, 1), (0, 3)], block_size=8)
    q = torch.randn(6, 2, 12)
    q[4:] = torch.nan
    out, lse = run(paged, q, paged.poisoned_pool(12), num_decode=1, r=12)
    assert torch.equal(out[4:], torch.zeros(2, 2, 12))
    assert torch.equal(lse[4:], torch.full((2, 2), -math.inf))
    assert out[:4].isfinite().all()


@pytest.mark.parametrize(("name", "p"), [("fp8_ds_mla", 4), ("mxfp8", 0), ("bf16", 4)])
def test_stored_formats(name: str, p: int) -> None:
    layout = kv_row_layout(name, latent_dim=32, rope_dim=p, model_dtype=torch.float32)
    paged = make_paged([(19, 1), (0, 12)], block_size=8)
    plain = paged.poisoned_pool(32 + p)
    pool = pack_rows(plain[:, :32], plain[:, 32:] if p else None, layout)
    q = torch.randn(13, 2, 32 + p)
    arguments = {
        "block_table": paged.block_table,
        "segments": paged.segments,
        "num_decode": 1,
        "block_size": 8,
        "scale": SCALE,
        "layout": layout,
    }
    out, lse = dense_mla(q, pool, **arguments)
    want_out, want_lse = reference.dense_mla(q, pool, **arguments)
    torch.testing.assert_close(out, want_out, rtol=0, atol=FP32_GEMM)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=FP32_GEMM)


def test_bf16_and_strides() -> None:
    paged = make_paged([(19, 1), (30, 1), (0, 12)], block_size=8)
    pool = paged.poisoned_pool(20, torch.bfloat16)
    q = torch.randn(3, 14, 20).bfloat16().transpose(0, 1)
    out, _ = run(paged, q, pool, num_decode=2, r=16)
    want, _ = run(paged, q.float(), pool.float(), num_decode=2, r=16)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), want, rtol=BF16_OUTPUT, atol=FP32_GEMM)
    wide = torch.full((14, 3, 40), torch.nan).bfloat16()
    wide[:, :, ::2] = q
    strided, _ = run(paged, wide[:, :, ::2], pool, num_decode=2, r=16)
    assert torch.equal(strided, out)
