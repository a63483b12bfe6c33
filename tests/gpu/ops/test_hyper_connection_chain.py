"""Expand and the next collapse of hyper-connections on a GPU: one after the other in a graph, as layers call them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sidestream.ops.hyper_connection import (
    hyper_connection_post,
    hyper_connection_post_pre,
    reference,
    triton_post,
    triton_post_pre,
)
from sidestream.ops.moe import ExpertSum, settled
from tests.tolerances import BF16_STEPS, FP32_GEMM

pytestmark = pytest.mark.gpu

HIDDEN = 4096
SETTINGS: dict[str, Any] = {"norm_eps": 1e-5, "eps": 1e-6, "iters": 20}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(9)


def site() -> dict[str, Any]:
    return {
        "fn": torch.randn(24, 4 * HIDDEN, device="cuda") / (4 * HIDDEN) ** 0.5,
        "base": torch.randn(24, device="cuda"),
        "norm_weight": (torch.rand(2, HIDDEN, device="cuda") + 0.5).bfloat16(),
    }


def given(rows: int) -> tuple[torch.Tensor, ...]:
    """streams, output, post, mix."""
    streams = torch.randn(rows, 4, HIDDEN, device="cuda").bfloat16()
    mix = torch.rand(rows, 4, 4, device="cuda").softmax(-1)
    return streams, torch.randn(rows, HIDDEN, device="cuda").bfloat16(), torch.rand(rows, 4, 1, device="cuda"), mix


@pytest.mark.parametrize("rows", [1, 2, 3, 64, 300])
def test_both_at_once_are_one_after_the_other(rows: int) -> None:
    made, (streams, output, post, mix) = site(), given(rows)
    got = hyper_connection_post_pre(streams, output, post, mix=mix, **made, **SETTINGS)
    assert torch.equal(got[0], hyper_connection_post(streams, output, post, mix=mix))
    want = reference.hyper_connection_pre(got[0], **made, **SETTINGS)
    # the collapse and its norm round to bf16 in turn, at values of order one
    error = (got[1].float() - want[0].float()).norm() / want[0].float().norm()
    assert float(error) < BF16_STEPS
    for a, b in zip(got[2:], want[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=FP32_GEMM)


@pytest.mark.parametrize("rows", [2, 3, 16, 17, 64])
def test_experts_summed_on_the_way_are_those_summed_apart(rows: int) -> None:
    made, (streams, _, post, mix) = site(), given(rows)
    ids = torch.rand(rows, 64, device="cuda").topk(8).indices
    ids[1, 3], ids[-1] = -1, -1
    partial = torch.randn(rows * 9, HIDDEN, device="cuda")
    partial[: rows * 8][ids.flatten() < 0] = torch.nan
    output = ExpertSum(partial, torch.rand(rows, 8, device="cuda"), ids, 1, torch.bfloat16)
    got = hyper_connection_post_pre(streams, output, post, mix=mix, **made, **SETTINGS)
    want = hyper_connection_post_pre(streams, settled(output), post, mix=mix, **made, **SETTINGS)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(hyper_connection_post(streams, output, post, mix=mix), got[0])
    assert torch.isfinite(got[0]).all()


@pytest.mark.parametrize("rows", [3, 16, 17, 64, 100])
def test_blocks_of_rows_are_mixed_as_rows_alone(rows: int) -> None:
    made, (streams, output, post, mix) = site(), given(rows)
    launch = triton_post_pre.launch_for(rows, HIDDEN)
    got = triton_post_pre.hyper_connection_post_pre(streams, output, post, mix=mix, **made, **SETTINGS, launch=launch)
    assert torch.equal(got[0], triton_post.hyper_connection_post(streams, output, post, mix=mix))
    want = reference.hyper_connection_pre(got[0], **made, **SETTINGS)
    error = (got[1].float() - want[0].float()).norm() / want[0].float().norm()
    assert float(error) < BF16_STEPS
    for a, b in zip(got[2:], want[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=FP32_GEMM)


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 33, 64, 100])
def test_overlapping_launches_of_a_chain_change_nothing(rows: int) -> None:
    """Each call reads what the one before it wrote, in memory that replays use again: running ahead would show."""
    sites, first = [site() for _ in range(6)], given(rows)
    launch = triton_post_pre.launch_for(rows, HIDDEN)

    def chain(overlap: bool) -> torch.Tensor:
        streams, output, post, mix = first
        for made in sites:
            streams, output, post, mix = triton_post_pre.hyper_connection_post_pre(
                streams,
                output,
                post,
                mix=mix,
                **made,
                **SETTINGS,
                launch=replace(launch, overlap=overlap, early=overlap),
            )
            if not overlap:
                torch.cuda.synchronize()
        return torch.cat([streams.flatten(), output.flatten(), post.flatten(), mix.flatten()])

    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(True)
    for _ in range(20):
        first[0].normal_()
        want = chain(False)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)
