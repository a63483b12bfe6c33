"""Sparse MLA on a GPU at the sizes of real models: right, undisturbed, repeatable, captured, in a pool beyond 2 GiB."""

from __future__ import annotations

import math

import pytest
import torch

from sidestream.ops.kv_rows import KVRowLayout, kv_row_layout, pack_rows, unpack_rows
from sidestream.ops.sparse_mla import sparse_mla, torch_impl
from sidestream.ops.sparse_mla.triton_impl import sparse_mla as launched
from sidestream.ops.sparse_mla.triton_launch import Launch
from tests.tolerances import BF16_STEPS

pytestmark = pytest.mark.gpu

WIDTH, LATENT, POOL_ROWS = 2051, 512, 30_000
LAYOUTS = [("bf16", 0), ("bf16", 64), ("mxfp8", 0), ("fp8_ds_mla", 64)]
ROLES = [
    *((name, p, block_n) for name, p in LAYOUTS[:2] for block_n in (64, 32)),
    ("mxfp8", 0, 64),
    *(("fp8_ds_mla", p, 64) for p in (64, 0)),
]
"""Row formats, sizes of rope keys, rows a tile of the kernel with roles."""


def layout_of(name: str, p: int) -> KVRowLayout:
    return kv_row_layout(name, latent_dim=LATENT, rope_dim=p, model_dtype=torch.bfloat16)


def draw_rows(counts: list[int], pool_rows: int = POOL_ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending rows a token, and their counts."""
    rows = torch.full((len(counts), WIDTH), -1, device="cuda")
    for t, count in enumerate(counts):
        rows[t, :count] = torch.randperm(pool_rows, device="cuda")[:count].sort().values
    return rows, torch.tensor(counts, dtype=torch.int32, device="cuda")


def pool_of(layout: KVRowLayout, rows: torch.Tensor) -> torch.Tensor:
    """NaN in every row that no token selected."""
    pool = torch.full((POOL_ROWS, layout.row_bytes), 0xFF, dtype=torch.uint8, device="cuda").view(layout.dtype)
    used = rows[rows >= 0].unique()
    rope = torch.randn(len(used), layout.rope_dim, device="cuda") if layout.rope_dim else None
    pool[used] = pack_rows(torch.randn(len(used), LATENT, device="cuda"), rope, layout)
    return pool


def queries(tokens: int, heads: int, layout: KVRowLayout) -> torch.Tensor:
    return torch.randn(tokens, heads, LATENT + layout.rope_dim, device="cuda").bfloat16()


def counts_for(tokens: int) -> list[int]:
    return [(2048, 2051, 0, 1, 33, 700)[t % 6] for t in range(tokens)]


SCALE = 1 / math.sqrt(192)


@pytest.mark.parametrize(("name", "p"), LAYOUTS)
@pytest.mark.parametrize("heads", [8, 16, 20, 32, 64, 128])
@pytest.mark.parametrize("tokens", [1, 7, 64, 200])
def test_equals_fp32(name: str, p: int, heads: int, tokens: int) -> None:
    layout = layout_of(name, p)
    rows, counts = draw_rows(counts_for(tokens))
    pool, q = pool_of(layout, rows), queries(tokens, heads, layout)
    out, lse = sparse_mla(q, pool, rows, counts=counts, scale=SCALE, layout=layout)
    want, want_lse = torch_impl.sparse_mla(q.float(), pool, rows, counts=counts, scale=SCALE, layout=layout)
    assert lse is not None
    assert want_lse is not None
    assert out.isfinite().all()
    row = want.norm(dim=2, keepdim=True).clamp_min(1e-30)
    assert ((out.float() - want) / row).norm(dim=2).max() <= BF16_STEPS
    empty = counts == 0
    assert torch.equal(lse[empty], want_lse[empty])
    assert (lse - want_lse)[~empty].abs().max() <= BF16_STEPS


@pytest.mark.parametrize(("name", "p"), LAYOUTS)
@pytest.mark.parametrize(("tokens", "heads"), [(3, 64), (8, 8), (40, 128), (150, 64)])
def test_the_same_bits_every_time(name: str, p: int, tokens: int, heads: int) -> None:
    layout = layout_of(name, p)
    rows, counts = draw_rows(counts_for(tokens))
    pool, q = pool_of(layout, rows), queries(tokens, heads, layout)
    out, lse = sparse_mla(q, pool, rows, counts=counts, scale=SCALE, layout=layout)
    assert lse is not None
    for _ in range(20):
        again, again_lse = sparse_mla(q, pool, rows, counts=counts, scale=SCALE, layout=layout)
        assert torch.equal(again, out)
        assert again_lse is not None
        assert torch.equal(again_lse, lse)


@pytest.mark.parametrize("tokens", [8, 150])
def test_a_token_depends_on_no_other(tokens: int) -> None:
    layout = layout_of("bf16", 64)
    rows, counts = draw_rows([2048] * tokens)
    pool, q = pool_of(layout, rows), queries(tokens, 64, layout)
    out, _ = sparse_mla(q, pool, rows, counts=counts, scale=SCALE, layout=layout)
    q[1::2], counts[1::2], rows[1::2, 9:] = torch.nan, 9, -1
    again, _ = sparse_mla(q, pool, rows, counts=counts, scale=SCALE, layout=layout)
    assert torch.equal(again[::2], out[::2])


@pytest.mark.parametrize(("name", "p"), LAYOUTS)
@pytest.mark.parametrize("tokens", [2, 150])
def test_in_a_graph(name: str, p: int, tokens: int) -> None:
    """Replays read counts and rows anew."""
    layout = layout_of(name, p)
    rows, counts = draw_rows([5] * tokens)
    other_rows, other_counts = draw_rows(counts_for(tokens))
    pool = pool_of(layout, torch.arange(POOL_ROWS, device="cuda"))
    q = queries(tokens, 64, layout)
    want, _ = sparse_mla(q, pool, other_rows, counts=other_counts, scale=SCALE, layout=layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = sparse_mla(q, pool, rows, counts=counts, scale=SCALE, layout=layout)
    rows.copy_(other_rows)
    counts.copy_(other_counts)
    for _ in range(2):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)


def test_a_pool_beyond_two_gibibytes() -> None:
    layout, pool_rows = layout_of("bf16", 64), 2_400_000
    pool = torch.full((pool_rows, layout.row_elems), torch.nan, dtype=torch.bfloat16, device="cuda")
    rows, counts = draw_rows([2048, 2000], pool_rows)
    rows[0, 2047] = pool_rows - 1
    used = rows[rows >= 0].unique()
    pool[used] = torch.randn(len(used), layout.row_elems, device="cuda").bfloat16()
    q = queries(2, 64, layout)
    out, _ = sparse_mla(q, pool, rows, counts=counts, scale=SCALE, layout=layout)
    want, _ = torch_impl.sparse_mla(q.float(), pool, rows, counts=counts, scale=SCALE, layout=layout)
    assert (out.float() - want).norm() <= BF16_STEPS * want.norm()


@pytest.mark.parametrize(("name", "p", "block_n"), ROLES)
@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (7, 64), (40, 40), (64, 128), (200, 64)])
@pytest.mark.parametrize("splits", [1, 2, 7, 32])
def test_the_kernel_with_roles(name: str, p: int, tokens: int, heads: int, splits: int, block_n: int) -> None:
    """Right, the same bits every time, and no token depends on another."""
    layout = layout_of(name, p)
    launch = Launch(splits, 64, block_n, 1, 8, parted=False, roles=True, in_threads=block_n == 32 or splits % 2 == 1)
    rows, counts = draw_rows(counts_for(tokens))
    pool, q = pool_of(layout, rows), queries(tokens, heads, layout)
    want, want_lse = torch_impl.sparse_mla(q.float(), pool, rows, counts=counts, scale=SCALE, layout=layout)
    empty = counts == 0
    for _ in range(20):
        out, lse = launched(q, pool, rows, counts=counts, scale=SCALE, layout=layout, launch=launch)
        assert out.isfinite().all()
        row = want.norm(dim=2, keepdim=True).clamp_min(1e-30)
        assert ((out.float() - want) / row).norm(dim=2).max() <= BF16_STEPS
        assert lse is not None
        assert want_lse is not None
        assert torch.equal(lse[empty], want_lse[empty])
        assert (lse - want_lse)[~empty].abs().le(BF16_STEPS).all()
    again, _ = launched(q, pool, rows, counts=counts, scale=SCALE, layout=layout, launch=launch)
    assert torch.equal(again, out)
    q[1::2], counts[1::2], rows[1::2, 9:] = torch.nan, 1, -1
    other, _ = launched(q, pool, rows, counts=counts, scale=SCALE, layout=layout, launch=launch)
    assert torch.equal(other[::2], out[::2])


@pytest.mark.parametrize(("name", "p", "block_n"), ROLES)
@pytest.mark.parametrize("splits", [1, 3])
def test_unpacked_rows_have_the_bits_that_their_format_says(name: str, p: int, block_n: int, splits: int) -> None:
    """All rows of a token are the same one, and its queries are zeros: so it finds that row. E4M3 numbers of every kind
    come with scales that lie far apart."""
    layout, tokens = layout_of(name, p), 37
    counts = [(1, 31, 33, 63, 65, 95, 127, 191, 700, 2051)[t % 10] for t in range(tokens)]
    rows, given = draw_rows(counts)
    for t, count in enumerate(counts):
        rows[t, :count] = 11 + 3 * t
    pool = pool_of(layout, rows)
    used = rows[:, 0]
    if layout.tile:
        code = torch.arange(tokens * LATENT, device="cuda").view(tokens, LATENT) * 7 % 254
        pool[used, :LATENT] = torch.where(code < 127, code, code + 1).byte()  # all but NaN
        power = torch.arange(tokens * layout.num_scales, device="cuda").view(tokens, -1) * 29 % 61 - 30
        if name == "mxfp8":
            pool[used, LATENT:] = (power + 127).byte()
        else:
            pool.view(torch.float32)[used, LATENT // 4 : LATENT // 4 + layout.num_scales] = 1.37 * 2.0**power
    q = torch.zeros(tokens, 64, LATENT + p, dtype=torch.bfloat16, device="cuda")
    launch = Launch(splits, 64, block_n, 1, 8, parted=False, roles=True, in_threads=splits > 1)
    out, lse = launched(q, pool, rows, counts=given, scale=SCALE, layout=layout, launch=launch)
    want = unpack_rows(pool[used], layout, dtype=torch.bfloat16)[:, None, :LATENT]
    assert torch.equal(out, want.expand(tokens, 64, LATENT))
    assert lse is not None
    assert (lse - given.log()[:, None]).abs().max() <= BF16_STEPS


def test_fp32_queries_run_in_torch() -> None:
    layout = layout_of("bf16", 0)
    rows, counts = draw_rows([300, 0])
    pool, q = pool_of(layout, rows), queries(2, 8, layout).float()
    out, _ = sparse_mla(q, pool, rows, counts=counts, scale=SCALE, layout=layout)
    want, _ = torch_impl.sparse_mla(q, pool, rows, counts=counts, scale=SCALE, layout=layout)
    assert torch.equal(out, want)


@pytest.mark.parametrize(("name", "p"), LAYOUTS)
@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (64, 128), (3000, 64), (70_000, 1)])
def test_real_sizes_never_run_in_torch(
    name: str, p: int, tokens: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes, prefills, and more tokens than a grid's second dimension could hold."""
    monkeypatch.delattr(torch_impl, "sparse_mla")
    layout = layout_of(name, p)
    rows, counts = draw_rows([33, 5])
    rows, counts = rows.repeat(-(-tokens // 2), 1)[:tokens], counts.repeat(-(-tokens // 2))[:tokens]
    q = queries(tokens, heads, layout)
    out, _ = sparse_mla(q, pool_of(layout, rows[:2]), rows, counts=counts, scale=SCALE, layout=layout)
    assert out.isfinite().all()
    assert out[-1].any()
