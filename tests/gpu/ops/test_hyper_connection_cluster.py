"""Expand and the next collapse of hyper-connections in one launch of clusters, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestream.ops.hyper_connection import reference, triton_post
from sidestream.ops.hyper_connection.launches import Cluster
from sidestream.ops.moe import ExpertSum, settled
from tests.gpu.ops.test_hyper_connection_chain import SETTINGS, given, site
from tests.tolerances import BF16_STEPS, FP32_GEMM

pytestmark = pytest.mark.gpu
triton_cluster = pytest.importorskip("sidestream.ops.hyper_connection.triton_cluster")

LAUNCHES = [
    Cluster(),
    Cluster(ahead=False),
    Cluster(late=True),
    Cluster(rows=4, terms=2),
    Cluster(rows=16),
    Cluster(warps=8, held=True),
    Cluster(rows=4, warps=8, terms=2, held=True),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(9)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("clusters of 16 are a Hopper's")


def run(streams: torch.Tensor, output: Any, post: torch.Tensor, mix: torch.Tensor, **made: Any) -> Any:
    launch = made.pop("launch")
    taken = (streams, output, made["fn"], made["base"], made["norm_weight"], launch)
    assert triton_cluster.takes(*taken)
    return triton_cluster.hyper_connection_post_pre(streams, output, post, mix=mix, **made, **SETTINGS, launch=launch)


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 8, 33, 64, 300])
def test_one_launch_is_both(rows: int, launch: Cluster) -> None:
    made, (streams, output, post, mix) = site(), given(rows)
    got = run(streams, output, post, mix, **made, launch=launch)
    assert torch.equal(got[0], triton_post.hyper_connection_post(streams, output, post, mix=mix))
    want = reference.hyper_connection_pre(got[0], **made, **SETTINGS)
    error = (got[1].float() - want[0].float()).norm() / want[0].float().norm()
    assert float(error) < BF16_STEPS
    for a, b in zip(got[2:], want[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=FP32_GEMM)


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("rows", [2, 16, 17, 64])
def test_experts_summed_on_the_way_are_those_summed_apart(rows: int, launch: Cluster) -> None:
    made, (streams, _, post, mix) = site(), given(rows)
    ids = torch.rand(rows, 64, device="cuda").topk(8).indices
    ids[1, 3], ids[-1] = -1, -1
    partial = torch.randn(rows * 9, streams.shape[2], device="cuda")
    partial[: rows * 8][ids.flatten() < 0] = torch.nan
    output = ExpertSum(partial, torch.rand(rows, 8, device="cuda"), ids, 1, torch.bfloat16)
    got = run(streams, output, post, mix, **made, launch=launch)
    for a, b in zip(got, run(streams, settled(output), post, mix, **made, launch=launch), strict=True):
        assert torch.equal(a, b)
    assert torch.isfinite(got[0]).all()


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_rows_have_the_same_bits_in_any_cluster(launch: Cluster) -> None:
    made, inputs = site(), given(64)
    whole = run(*inputs, **made, launch=launch)
    for first, last in ((0, 1), (5, 8), (13, 64)):
        part = run(*(each[first:last] for each in inputs), **made, launch=launch)
        for a, b in zip(whole, part, strict=True):
            assert torch.equal(a[first:last], b)


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_garbage_in_one_row_stays_there(launch: Cluster) -> None:
    made, inputs = site(), given(22)
    clean = run(*inputs, **made, launch=launch)
    inputs[0][::2] = torch.nan
    for a, b in zip(clean, run(*inputs, **made, launch=launch), strict=True):
        assert torch.equal(a[1::2], b[1::2])


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 33, 64])
def test_overlapping_launches_of_a_chain_change_nothing(rows: int, launch: Cluster) -> None:
    """Each call reads what the one before it wrote, in memory that replays use again: running ahead would show, and so
    would sums that a processor reads before another has written them."""
    sites, first = [site() for _ in range(6)], given(rows)

    def chain(pause: bool) -> torch.Tensor:
        state = first
        for made in sites:
            state = run(*state, **made, launch=launch)
            if pause:
                torch.cuda.synchronize()
        return torch.cat([part.flatten() for part in state])

    chain(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(False)
    for _ in range(20):
        first[0].normal_()
        want = chain(True)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)
