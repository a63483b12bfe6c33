"""Merges of runs, spread over threads or within each: against the sum they stand for, with NaN where no run wrote."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ops.triton_mode import DEVICE
from tests.tolerances import FP32_GEMM

triton_launch = pytest.importorskip("sidestream.ops.sparse_mla.triton_launch")


def drawn(tokens: int, splits: int, heads: int, latent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts and log-sum-exps; token t has its first runs alone, the last token none."""
    parts, lse = torch.randn(tokens, splits, heads, latent), 5 * torch.randn(tokens, splits, heads)
    for t in range(tokens):
        held = 0 if t == tokens - 1 else max(1, splits - t % splits)
        parts[t, held:], lse[t, held:] = torch.nan, -math.inf
    return parts, lse


def merged(
    parts: torch.Tensor, lse: torch.Tensor, *, in_threads: bool, sparing: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, splits, heads, latent = parts.shape
    launch = triton_launch.Launch(splits, 16, 16, 1, 4, parted=False, in_threads=in_threads)
    out = torch.full((tokens, heads, latent), torch.nan, device=DEVICE)
    whole = torch.full((tokens, heads), torch.nan, device=DEVICE)
    triton_launch.merge_runs(parts.to(DEVICE), lse.to(DEVICE), out, whole, launch=launch, sparing=sparing, pdl=False)
    return out.cpu(), whole.cpu()


@pytest.mark.parametrize("in_threads", [False, True])
@pytest.mark.parametrize("sparing", [False, True])
@pytest.mark.parametrize(
    ("tokens", "splits", "heads", "latent"),
    [(3, 2, 5, 64), (4, 5, 3, 16), (2, 16, 3, 512), (3, 33, 2, 64), (2, 70, 1, 16), (9, 3, 57, 512)],
)
def test_equals_the_weighted_sum(
    tokens: int, splits: int, heads: int, latent: int, sparing: bool, in_threads: bool
) -> None:
    parts, lse = drawn(tokens, splits, heads, latent)
    out, whole = merged(parts, lse, sparing=sparing, in_threads=in_threads)
    want = lse.logsumexp(1)
    weight = torch.where(lse.isinf(), 0.0, (lse - want[:, None]).exp())
    want_out = (parts.nan_to_num() * weight[..., None]).sum(1)
    torch.testing.assert_close(out, want_out, rtol=0, atol=FP32_GEMM)
    torch.testing.assert_close(whole, want, rtol=0, atol=FP32_GEMM)
    assert torch.equal(out[-1], torch.zeros(heads, latent))


def test_what_other_runs_hold_changes_no_bit() -> None:
    """Within threads runs are added in their order, so a row's bits depend on its own runs alone."""
    parts, lse = drawn(4, 5, 3, 64)
    out, whole = merged(parts, lse, sparing=False, in_threads=True)
    parts[1:], lse[1:] = -parts[1:], 0.5 * lse[1:]
    again, again_whole = merged(parts, lse, sparing=False, in_threads=True)
    assert torch.equal(again[0], out[0])
    assert torch.equal(again_whole[0], whole[0])
    assert not torch.equal(again[1], out[1])
