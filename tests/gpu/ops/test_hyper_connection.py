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

pytestmark = pytest.mark.gpu
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


def collapse_bound(made: dict[str, Any], normed: torch.Tensor) -> torch.Tensor:
    """How far the normed collapse may be from ``normed``, [rows, HIDDEN] fp32. Exact: n = w c / r, where c is the sum
    over streams of share * x, r the root mean square of c over the row, and w the norm's weight.

    - Each share is FP32_GEMM off, as the post weights are, which come from the same product and are tested beside it.
      So c is off by FP32_GEMM * s, where s is the sum over streams of |x|; r is off by FP32_GEMM * rms(s) at most
      (triangle inequality); and n by FP32_GEMM * (w s / r + |n| rms(s) / r).
    - fp32: collapse, norm and weight are a dozen operations of half an ulp each, 4 * FP32_ROUNDING of n at most.
    - bf16: collapse, norm and weight are each rounded once on both sides, from values that are all but equal, so at
      worst to neighbours: one ulp each, 2 * BF16_OUTPUT of n. (What a rounding of c moves in r is as much smaller as
      the root of HIDDEN is larger.)
    """
    wide, weight = made["streams"].float(), made["norm_weight"][0].float()
    shares = (wide.flatten(1) @ made["fn"][:4].T * (wide.flatten(1).square().mean(1, keepdim=True)).rsqrt()).add(
        made["base"][:4]
    )
    collapsed = (shares.sigmoid()[:, :, None] * wide).sum(1)
    root, sizes = collapsed.square().mean(1, keepdim=True).sqrt(), wide.abs().sum(1)
    of_shares = weight * sizes / root + normed.float().abs() * sizes.square().mean(1, keepdim=True).sqrt() / root
    rounding = 4 * FP32_ROUNDING if made["streams"].dtype == torch.float32 else (1 + 2 * BF16_OUTPUT) ** 3 - 1
    return FP32_GEMM * of_shares + rounding * normed.float().abs()


def assert_within(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> None:
    share = ((got.float() - want.float()).abs() / bound).nan_to_num(nan=torch.inf)
    worst = float(share.max())
    assert worst <= 1, f"{int((share > 1).sum())} of {share.numel()} values are off, up to {worst:.2f} times the bound"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", ROWS)
def test_collapse_and_expand_equal_the_formula(rows: int, dtype: torch.dtype) -> None:
    made = inputs(rows, dtype)
    got, want = pre(made), wanted(made)
    assert_within(got[0], want[0], collapse_bound(made, want[0]))
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=FP32_GEMM)
    torch.testing.assert_close(got[2], want[2], rtol=0, atol=FP32_GEMM)
    output = torch.randn(rows, HIDDEN, device="cuda").to(dtype)
    new = hyper_connection_post(made["streams"], output, got[1], mix=got[2])
    expected = reference.hyper_connection_post(made["streams"], output, got[1], mix=got[2])
    # Five products in fp32, of up to 2 * 5 each; in bf16 both sides round the sum once, at worst to neighbours.
    rounding = 0.0 if dtype == torch.float32 else 2 * BF16_OUTPUT
    torch.testing.assert_close(new, expected, rtol=rounding, atol=FP32_GEMM)


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
        pre_launch = replace(triton_pre.launch_for(8, 4 * HIDDEN), overlap=overlap, early=early)
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
