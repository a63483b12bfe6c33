"""Hyper-connections on a GPU at the sizes of real models: against the formula, poisoned, repeated, captured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sidestream.ops.hyper_connection import (
    hyper_connection_post,
    hyper_connection_pre,
    reference,
    triton_post,
    triton_pre,
)
from tests.ops.operator_case import call
from tests.tolerances import BF16_OUTPUT, FP32_GEMM, FP32_ROUNDING

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
HIDDEN = 4096
ROWS = [1, 3, 16, 64, 200, 700, 5000]
"""One or more for each choice of launches."""


def inputs(rows: int, dtype: torch.dtype, hidden: int = HIDDEN) -> dict[str, Any]:
    made = {
        "streams": torch.randn(rows, 4, hidden, device="cuda").to(dtype),
        "fn": torch.randn(24, 4 * hidden, device="cuda") / (4 * hidden) ** 0.5,
        "base": torch.randn(24, device="cuda"),
        "norm_weight": (torch.rand(2, hidden, device="cuda") + 0.5).to(dtype),
    }
    return {**made, "norm_eps": 1e-5, "eps": 1e-6, "iters": 20}


def pre(made: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    return call(hyper_connection_pre, made)


def wanted(made: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """By the formula, its product in fp64: a GPU's fp32 product may round as coarsely as what is tested."""
    exact = {**made, "fn": made["fn"].double(), "base": made["base"].double()}
    wide = made["streams"].double()
    flat = wide.flatten(1)
    inverse = (flat.square().mean(1, keepdim=True) + made["norm_eps"]).rsqrt()
    logits = (flat * inverse) @ exact["fn"].T + exact["base"]
    pre, post = logits[:, :4].sigmoid() + made["eps"], logits[:, 4:8].sigmoid()
    comb = logits[:, 8:].view(-1, 4, 4).softmax(-1) + made["eps"]
    for half in range(2 * made["iters"] - 1):
        comb = comb / (comb.sum(dim=1 if half % 2 == 0 else 2, keepdim=True) + made["eps"])
    collapsed = (pre[:, :, None] * wide).sum(1).to(made["streams"].dtype)
    normed = reference.rms_norm(collapsed, made["norm_weight"][0], made["norm_eps"])
    return normed, post.float().unsqueeze(2), comb.transpose(1, 2).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", ROWS)
def test_collapse_and_expand_equal_the_formula(rows: int, dtype: torch.dtype) -> None:
    made = inputs(rows, dtype)
    got, want = pre(made), wanted(made)
    # Collapse, norm and weight each round to bf16, each perhaps to the other side: one ulp each.
    bound = 4 * FP32_ROUNDING if dtype == torch.float32 else 3 * 2 * BF16_OUTPUT
    # A share that is FP32_GEMM off moves the collapsed row by that much of each stream.
    reach = FP32_GEMM * float(made["streams"].float().abs().sum(dim=1).max())
    torch.testing.assert_close(got[0], want[0], rtol=bound, atol=reach)
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=FP32_GEMM)
    torch.testing.assert_close(got[2], want[2], rtol=0, atol=FP32_GEMM)
    output = torch.randn(rows, HIDDEN, device="cuda").to(dtype)
    new = hyper_connection_post(made["streams"], output, got[1], mix=got[2])
    expected = reference.hyper_connection_post(made["streams"], output, got[1], mix=got[2])
    torch.testing.assert_close(new, expected, rtol=bound, atol=FP32_GEMM)


@pytest.mark.parametrize("rows", [1, 64, 700])
def test_the_same_bits_every_time(rows: int) -> None:
    made = inputs(rows, torch.bfloat16)
    first = pre(made)
    for _ in range(20):
        again = pre(made)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize(("overlap", "early"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("captured", [False, True])
def test_overlapping_kernels_change_nothing(overlap: bool, early: bool, captured: bool) -> None:
    """Results of other rows lie in the same memory from call to call: a kernel that ran ahead would read those."""
    calls = [inputs(8, torch.bfloat16) for _ in range(6)]

    def layers(overlap: bool, early: bool) -> list[torch.Tensor]:
        pre_launch = replace(triton_pre.launch_for(8), overlap=overlap, early=early)
        post_launch, results = replace(triton_post.launch_for(8), early=early), []
        for made in calls:
            normed, post, mix = triton_pre.hyper_connection_pre(**made, launch=pre_launch)
            results.append(
                triton_post.hyper_connection_post(made["streams"], normed, post, mix=mix, launch=post_launch)
            )
        return results

    want = [result.clone() for result in layers(overlap=False, early=False)]
    replay = None
    if captured:
        layers(overlap, early)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = layers(overlap, early)
        replay = graph.replay
    for _ in range(20):
        if replay is not None:
            for result in got:
                result.fill_(torch.nan)
            replay()
        else:
            got = layers(overlap, early)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("rows", [6, 700])
def test_garbage_in_one_row_stays_there(rows: int) -> None:
    made = inputs(rows, torch.bfloat16)
    clean = pre(made)
    made["streams"][::2] = torch.nan
    dirty = pre(made)
    assert all(torch.equal(a[1::2], b[1::2]) for a, b in zip(clean, dirty, strict=True))


@pytest.mark.parametrize("rows", [1, 64])
def test_in_a_graph(rows: int) -> None:
    made = inputs(rows, torch.bfloat16)

    def layer() -> torch.Tensor:
        normed, post, mix = pre(made)
        return hyper_connection_post(made["streams"], normed, post, mix=mix)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for _ in range(3):
        made["streams"].normal_()
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, layer())


def test_streams_beyond_two_gigabytes() -> None:
    """70,000 rows of 32 KB: the last ones equal the same rows alone."""
    rows, tail = 70_000, 700
    made = inputs(rows, torch.bfloat16)
    alone = {**made, "streams": made["streams"][-tail:].clone()}
    whole, part = pre(made), pre(alone)
    assert all(torch.equal(a[-tail:], b) for a, b in zip(whole, part, strict=True))
    output = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    new = hyper_connection_post(made["streams"], output, whole[1], mix=whole[2])
    expected = hyper_connection_post(alone["streams"], output[-tail:], part[1], mix=part[2])
    assert torch.equal(new[-tail:], expected)
