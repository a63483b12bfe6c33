"""The Triton kernel that writes KV rows: the reference's bytes in every layout, and no other row touched."""

from __future__ import annotations

import math

import pytest
import torch

from sidestream.ops.kv_rows import KVRowLayout, kv_row_layout, reference
from tests.ops.triton_mode import DEVICE

triton_write = pytest.importorskip("sidestream.ops.kv_rows.triton_write")

# numpy warns where the interpreter divides infinities and NaN, which is what these rows are for.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")


def edge_rows(dtype: torch.dtype, r: int) -> torch.Tensor:
    """[9, r]: sizes far apart, ties of rounding, a clamped quotient, zeros of both signs, denormals."""
    latent = torch.randn(9, r) * torch.tensor([1.0, 1e-3, 300.0, 1e-30, 1e30, 0.0, 1e-40, 3e38 / 6, 20.0])[:, None]
    latent[1, : r // 4] = 0
    latent[2, :4] = torch.tensor([448.0, 448.0 * 1.0625, -0.0, 2.0**-9])
    latent[8, :8] = torch.tensor([448.0, 0.5 * 2**-9, 1.5 * 2**-9, -2.5 * 2**-9, 17.0, 19.0, 2.0**-6, 0.96875 * 2**-6])
    return latent.to(dtype)


def both(layout: KVRowLayout, latent: torch.Tensor, rope: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of a pool after the kernel and after the reference wrote the same rows."""
    tokens = latent.shape[0]
    pool = torch.full((30, layout.row_bytes), 0x7F, dtype=torch.uint8).view(layout.dtype)
    rows, want = torch.randperm(30)[:tokens], pool.clone()
    reference.write_rows(want, rows, latent, rope=rope, layout=layout)
    got = pool.to(DEVICE)
    moved = None if rope is None else rope.to(DEVICE)
    triton_write.write_rows(got, rows.to(DEVICE), latent.to(DEVICE), rope=moved, layout=layout)
    return got.cpu().view(torch.uint8), want.view(torch.uint8)


LAYOUTS = [
    ("auto", 64, 0),
    ("auto", 64, 4),
    ("bf16", 64, 4),
    ("fp8_ds_mla", 256, 16),
    ("fp8_ds_mla", 64, 0),
    ("mxfp8", 64, 0),
    ("bf16", 24, 6),
]


@pytest.mark.parametrize(("name", "r", "p"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_equal_the_reference(name: str, r: int, p: int, dtype: torch.dtype) -> None:
    layout = kv_row_layout(name, latent_dim=r, rope_dim=p, model_dtype=dtype)
    latent = edge_rows(dtype, 2 * r)[:, ::2]
    rope = torch.randn(p, 9).to(dtype).t() if p else None
    got, want = both(layout, latent, rope)
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["fp8_ds_mla", "mxfp8"])
def test_bad_values_spoil_their_tile_alone(name: str) -> None:
    layout = kv_row_layout(name, latent_dim=256, rope_dim=0, model_dtype=torch.float32)
    latent = torch.randn(3, 256)
    latent[0, 5], latent[1, 200], latent[2, 130] = math.nan, math.inf, -math.inf
    got, want = both(layout, latent, None)
    assert torch.equal(got, want)


def test_no_tokens_write_nothing() -> None:
    layout = kv_row_layout("mxfp8", latent_dim=32, rope_dim=0, model_dtype=torch.float32)
    pool = torch.full((4, layout.row_elems), 9, dtype=torch.uint8, device=DEVICE)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    triton_write.write_rows(pool, none, torch.empty(0, 32, device=DEVICE), rope=None, layout=layout)
    assert (pool == 9).all()
