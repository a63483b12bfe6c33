"""Writing rows touches the rows it names and nothing else."""

from __future__ import annotations

import pytest
import torch

from sidestream.ops.kv_rows import kv_row_layout, reference, unpack_rows, write_rows


@pytest.mark.parametrize(
    ("name", "p"), [("auto", 0), ("auto", 4), ("bf16", 4), ("fp8_ds_mla", 4), ("fp8_ds_mla", 0), ("mxfp8", 0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_only_its_rows(name: str, p: int, dtype: torch.dtype) -> None:
    layout = kv_row_layout(name, latent_dim=32, rope_dim=p, model_dtype=dtype)
    if layout.tile:
        pool = torch.full((20, layout.row_elems), 0x7F, dtype=torch.uint8)
    else:
        pool = torch.full((20, layout.row_elems), torch.nan, dtype=layout.dtype)
    want, rows = pool.clone(), torch.randperm(20)[:7]
    latent = torch.randn(7, 64)[:, ::2].to(dtype)
    rope = torch.randn(7, p).to(dtype) if p else None
    write_rows(pool, rows, latent, rope=rope, layout=layout)
    reference.write_rows(want, rows, latent, rope=rope, layout=layout)
    assert torch.equal(pool.view(torch.uint8), want.view(torch.uint8))
    assert unpack_rows(pool[rows], layout, dtype=torch.float32).isfinite().all()
    write_rows(pool, rows[:0], latent[:0], rope=None if rope is None else rope[:0], layout=layout)
    assert torch.equal(pool.view(torch.uint8), want.view(torch.uint8))
