"""Triton sparse MLA: every row format against the reference, in poisoned pools, cut into runs in every way."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from sidestream.ops.kv_rows import KVRowLayout, kv_row_layout
from sidestream.ops.sparse_mla import reference, sparse_mla, torch_impl
from tests.ops.sparse_mla.test_sparse_mla import draw_rows, poisoned
from tests.ops.triton_mode import DEVICE, INTERPRETED
from tests.tolerances import BF16_STEPS, FP32_GEMM

triton_launch = pytest.importorskip("sidestream.ops.sparse_mla.triton_launch")
triton_impl = pytest.importorskip("sidestream.ops.sparse_mla.triton_impl")
bench_sparse_mla = pytest.importorskip("benchmarks.kernels.bench_sparse_mla")

SCALE, COUNTS = 0.2, [70, 0, 1, 33, 16]
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
LAUNCH = triton_launch.Launch(splits=1, block_h=16, block_n=16, stages=2, warps=4, parted=True)


def layout_of(name: str, p: int, r: int = 64) -> KVRowLayout:
    return kv_row_layout(name, latent_dim=r, rope_dim=p, model_dtype=DTYPE)


def run(
    q: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, layout: KVRowLayout, **change: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels, whatever the device of the inputs; results on the CPU."""
    on = [tensor.to(DEVICE) for tensor in (q, pool, rows, counts)]
    out, lse = triton_impl.sparse_mla(
        *on[:3], counts=on[3], scale=SCALE, layout=layout, launch=replace(LAUNCH, **change)
    )
    return out.cpu(), lse.cpu()


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    if INTERPRETED:
        torch.testing.assert_close(got.float(), want, rtol=0, atol=FP32_GEMM)
        return
    infinite = want.isinf()
    assert torch.equal(got.float()[infinite], want[infinite])
    error = (got.float() - want)[~infinite].abs().max()
    assert error <= BF16_STEPS * want[~infinite].abs().max()


@pytest.mark.parametrize(
    ("name", "p"), [("auto", 16), ("bf16", 0), ("bf16", 16), ("fp8_ds_mla", 16), ("fp8_ds_mla", 0), ("mxfp8", 0)]
)
@pytest.mark.parametrize(("splits", "in_threads"), [(1, False), (3, False), (3, True)])
def test_equals_the_reference(name: str, p: int, splits: int, in_threads: bool) -> None:
    layout = layout_of(name, p)
    rows, counts = draw_rows(5, 70, COUNTS)
    pool, q = poisoned(layout, rows), torch.randn(5, 5, 64 + p).to(DTYPE)
    out, lse = run(q, pool, rows, counts, layout, splits=splits, parted=splits == 1, in_threads=in_threads)
    want_out, want_lse = reference.sparse_mla(q, pool, rows, counts=counts, scale=SCALE, layout=layout)
    assert (out.dtype, lse.dtype) == (DTYPE, torch.float32)
    check(out, want_out)
    check(lse, want_lse)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(lse[1], torch.full((5,), -math.inf))


@pytest.mark.parametrize("scratch", [None, 1])
@pytest.mark.parametrize("launch", [None, LAUNCH, replace(LAUNCH, splits=3)])
def test_rows_behind_the_tokens_are_zeros(launch: Any, scratch: int | None) -> None:
    """And the others have the bits that they have alone; torch takes what has no launch here."""
    layout = layout_of("auto", 16)
    rows, counts = draw_rows(3, 40, [40, 0, 17])
    pool, q = poisoned(layout, rows).to(DEVICE), torch.randn(3, 4, 80).to(DEVICE, DTYPE)
    function = torch_impl.sparse_mla if launch is None else partial(triton_impl.sparse_mla, launch=launch)
    given = partial(function, q, pool, rows.to(DEVICE), counts=counts.to(DEVICE), scale=SCALE, layout=layout)
    out, lse = given(out_rows=7, scratch_bytes=scratch)
    want, want_lse = given(scratch_bytes=scratch)
    assert out.shape == (7, 4, 64)
    assert torch.equal(out[:3], want)
    assert torch.equal(out[3:], torch.zeros_like(out[3:]))
    assert lse is not None
    assert want_lse is not None
    assert torch.equal(lse, want_lse)


@pytest.mark.parametrize("splits", [1, 2])
def test_blocks_of_heads_strides_and_int32_rows(splits: int) -> None:
    layout = layout_of("auto", 16)
    rows, counts = draw_rows(3, 20, [20, 0, 17])
    pool = poisoned(layout, rows)
    q = torch.randn(20, 3, 80).to(DTYPE).transpose(0, 1)
    wide = torch.full((6, 41), 10**6, dtype=torch.int32)
    wide[::2, 1::2] = rows.int()
    out, lse = run(q, pool, wide[::2, 1::2], counts.repeat_interleave(2)[::2], layout, splits=splits)
    want_out, want_lse = reference.sparse_mla(q, pool, rows, counts=counts, scale=SCALE, layout=layout)
    check(out, want_out)
    check(lse, want_lse)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_depends_on_no_other() -> None:
    layout = layout_of("auto", 0, 32)
    rows, counts = draw_rows(4, 40, [40, 9, 30, 0])
    pool, q = poisoned(layout, rows), torch.randn(4, 3, 32).to(DTYPE)
    out, lse = run(q, pool, rows, counts, layout, splits=2)
    q[0], q[3] = torch.nan, torch.nan
    counts[0], rows[0, 5:] = 5, -1
    again, again_lse = run(q, pool, rows, counts, layout, splits=2)
    assert torch.equal(again[1:], out[1:])
    assert torch.equal(again_lse[1:], lse[1:])
    assert again[0].isnan().all()


def test_large_scores_do_not_overflow() -> None:
    layout = layout_of("auto", 0, 16)
    rows, counts = draw_rows(2, 40, [40, 25])
    pool, q = poisoned(layout, rows), (torch.randn(2, 3, 16) * 1e4).to(DTYPE)
    for splits in (1, 2):
        out, lse = run(q, pool, rows, counts, layout, splits=splits)
        want_out, want_lse = reference.sparse_mla(q, pool, rows, counts=counts, scale=SCALE, layout=layout)
        torch.testing.assert_close(
            out.float(), want_out, rtol=BF16_STEPS, atol=1e-2
        )  # scores of 1e4 carry errors of 1e-3
        torch.testing.assert_close(lse, want_lse, rtol=FP32_GEMM, atol=0)


def test_what_the_kernels_do_not_support_runs_in_torch() -> None:
    layout = layout_of("auto", 4, 24)
    rows, counts = draw_rows(2, 5, [5, 0])
    pool, q = poisoned(layout, rows), torch.randn(2, 3, 28).to(DTYPE)
    out, lse = run(q, pool, rows, counts, layout)
    want, want_lse = sparse_mla(
        q.to(DEVICE), pool.to(DEVICE), rows.to(DEVICE), counts=counts.to(DEVICE), scale=SCALE, layout=layout
    )
    assert want_lse is not None
    assert torch.equal(out, want.cpu())
    assert torch.equal(lse, want_lse.cpu())


def test_runs_follow_from_shapes() -> None:
    """One run where tokens fill the device, more where they do not, never more than there are tiles."""
    splits_for = triton_launch.splits_for
    assert splits_for(2048, 64, 32, 32) == 1
    assert splits_for(132, 64, 32, 32) == 1
    assert [splits_for(64, 64, 32, 32), splits_for(32, 64, 32, 32)] == [2, 4]
    assert 8 <= splits_for(1, 64, 32, 32) <= 32
    assert splits_for(1, 1, 32, 32) == 1
    assert splits_for(64, 64, 32, 64, programs=264) == 4
    for tokens, heads, block_h in ((1, 1, 16), (1, 64, 16), (2, 8, 16), (2, 20, 32), (2, 64, 64), (1, 128, 64)):
        assert triton_launch.choose_launch(tokens, heads, 2048, layout_of("auto", 0, 512), 32).block_h == block_h


def test_one_token_of_packed_rows_is_unpacked_once_for_all_heads() -> None:
    for name, p in (("mxfp8", 0), ("fp8_ds_mla", 64)):
        launch = triton_launch.choose_launch(1, 64, 2048, layout_of(name, p, 512), 33)
        assert (launch.block_h, launch.block_n, launch.splits, launch.parted) == (64, 64, 32, True)
        assert triton_launch.choose_launch(1, 8, 2048, layout_of(name, p, 512), 33).block_h == 16


@pytest.mark.parametrize(
    ("name", "p", "width", "tokens", "want"),
    [
        ("mxfp8", 0, 2048, 1, (32, 64, False, False)),
        ("bf16", 0, 2048, 1, (32, 32, False, False)),
        ("mxfp8", 0, 2048, 4, (32, 64, True, True)),
        ("mxfp8", 0, 2051, 4, (33, 64, True, True)),
        ("mxfp8", 0, 2048, 8, (16, 64, True, True)),
        ("bf16", 0, 2048, 2, (32, 32, True, True)),
        ("fp8_ds_mla", 64, 2048, 4, (32, 64, False, True)),
        ("bf16", 0, 2048, 8, (16, 32, True, True)),
        ("fp8_ds_mla", 64, 2048, 8, (16, 64, True, True)),
        ("mxfp8", 0, 2051, 8, (11, 64, True, True)),
        ("bf16", 0, 2048, 16, (8, 64, True, True)),
        ("fp8_ds_mla", 64, 2048, 32, (4, 64, True, True)),
        ("mxfp8", 0, 2048, 64, (2, 64, True, True)),
        ("fp8_ds_mla", 64, 2048, 64, (2, 64, True, True)),
        ("fp8_ds_mla", 64, 2048, 128, (1, 64, True, False)),
        ("bf16", 0, 2048, 2048, (1, 64, True, False)),
    ],
)
def test_tables_choose_what_was_fastest_on_a_hopper_gpu(
    name: str,
    p: int,
    width: int,
    tokens: int,
    want: tuple[int, int, bool, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """(runs, rows a tile, roles, merge in threads) of 64 heads, as measured, and between what was measured."""
    monkeypatch.setattr(triton_launch, "roles_support", lambda layout: True)
    choose = triton_launch.choose_launch.__wrapped__
    launch = choose(tokens, 64, width, layout_of(name, p, 512), triton_impl.MAX_SPLITS)
    assert (launch.splits, launch.block_n, launch.roles, launch.in_threads) == want


def test_all_that_the_benchmark_launches_has_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch with roles has a tile of its format; the table's choice is among them."""
    monkeypatch.setattr(triton_launch, "roles_support", lambda layout: True)
    choose = triton_launch.choose_launch.__wrapped__
    monkeypatch.setattr(bench_sparse_mla, "choose_launch", choose)
    met = set()
    for shape in bench_sparse_mla.shapes():
        layout = layout_of(shape.layout, shape.rope, 512)
        found = bench_sparse_mla.variants(shape)
        assert found[0] == choose(shape.tokens, shape.heads, shape.width, layout, triton_impl.MAX_SPLITS)
        met |= {(shape.layout, launch.block_n) for launch in found if launch.roles}
    assert met == {("bf16", 64), ("bf16", 32), ("mxfp8", 64), ("fp8_ds_mla", 64)}


def test_a_few_long_contexts_have_more_runs_than_threads_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "roles_support", lambda layout: True)
    choose, layout = triton_launch.choose_launch.__wrapped__, layout_of("bf16", 64, 512)
    found = [choose(rows, 32, 131_072, layout, 128, paged=True) for rows in (1, 8)]
    assert [(one.splits, one.in_threads, one.early, one.block_n) for one in found] == [
        (128, False, True, 64),
        (16, True, False, 64),
    ]
