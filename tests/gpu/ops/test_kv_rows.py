"""Writing KV rows on a GPU: the bytes that a CPU packs, at real sizes, in a graph, far into a large pool."""

from __future__ import annotations

import pytest
import torch

from sidestream.ops.kv_rows import kv_row_layout, pack_rows, write_rows

pytestmark = pytest.mark.gpu

LAYOUTS = [("auto", 64), ("bf16", 0), ("mxfp8", 0), ("fp8_ds_mla", 64), ("fp8_ds_mla", 0)]


@pytest.mark.parametrize(("name", "p"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 128, 8192])
def test_bytes_equal_what_a_cpu_packs(name: str, p: int, dtype: torch.dtype, tokens: int) -> None:
    layout = kv_row_layout(name, latent_dim=512, rope_dim=p, model_dtype=dtype)
    latent = (torch.randn(tokens, 512) * torch.logspace(-8, 8, tokens)[:, None]).to(dtype)
    latent[0, :256] = 0
    rope = torch.randn(tokens, p).to(dtype) if p else None
    pool = torch.full((9000, layout.row_bytes), 0xFF, dtype=torch.uint8).view(layout.dtype)
    rows, want = torch.randperm(9000)[:tokens], pool.clone()
    want[rows] = pack_rows(latent, rope, layout)
    got, moved = pool.cuda(), None if rope is None else rope.cuda()
    for _ in range(20):
        write_rows(got, rows.cuda(), latent.cuda(), rope=moved, layout=layout)
    assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))


def test_in_a_graph() -> None:
    layout = kv_row_layout("fp8_ds_mla", latent_dim=512, rope_dim=64, model_dtype=torch.bfloat16)
    pool = torch.zeros(50, layout.row_elems, dtype=torch.uint8, device="cuda")
    rows = torch.arange(4, device="cuda")
    latent = torch.randn(4, 512, device="cuda").bfloat16()
    rope = torch.randn(4, 64, device="cuda").bfloat16()
    write_rows(pool, rows, latent, rope=rope, layout=layout)
    first = pool.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_rows(pool, rows, latent, rope=rope, layout=layout)
    rows.copy_(torch.tensor([40, 2, 31, 49]))
    pool.zero_()
    graph.replay()
    want = torch.zeros_like(first)
    want[rows] = first[:4]
    assert torch.equal(pool, want)


def test_a_pool_beyond_two_gibibytes() -> None:
    layout = kv_row_layout("fp8_ds_mla", latent_dim=512, rope_dim=64, model_dtype=torch.bfloat16)
    pool = torch.zeros(3_400_000, layout.row_elems, dtype=torch.uint8, device="cuda")
    rows = torch.tensor([3_399_999, 0, 3_300_000], device="cuda")
    latent = torch.randn(3, 512).bfloat16()
    rope = torch.randn(3, 64).bfloat16()
    write_rows(pool, rows, latent.cuda(), rope=rope.cuda(), layout=layout)
    assert torch.equal(pool[rows].cpu(), pack_rows(latent, rope, layout))
    pool[rows] = 0
    assert not pool.any()
