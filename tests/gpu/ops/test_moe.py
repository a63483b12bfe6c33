"""Router, experts and SwiGLU on a GPU at the sizes of real models: right, repeatable, captured, blind to poison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sidestream.ops.moe import experts, reference, route, swiglu, torch_impl
from sidestream.ops.moe.triton_grouped import FP32_PARTIAL_TOKENS
from sidestream.ops.moe.triton_tiles import EXPERT_TILES, MANY_ROWS, ONE_TOKEN, ROLES, ExpertTiles
from tests.tolerances import BF16_OUTPUT, FP32_GEMM, FP32_ROUNDING

pytestmark = pytest.mark.gpu

HIDDEN, INNER, EXPERTS, TOP_K = 4096, 2048, 64, 8
TOKENS = [1, 2, 3, 8, 16, 17, 64, 200, 700, 1500, 4900]  # every row of the table, and roles
LIMIT = 1.5
"""Cuts a tenth of the gates: their spread is one."""


def draw(*shape: int, spread: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, spread)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


@pytest.fixture(scope="module")
def w13() -> torch.Tensor:
    """[EXPERTS + 1, 2 * INNER, HIDDEN], 2.2 GB."""
    return draw(EXPERTS + 1, 2 * INNER, HIDDEN, spread=HIDDEN**-0.5)


@pytest.fixture(scope="module")
def w2() -> torch.Tensor:
    return draw(EXPERTS + 1, HIDDEN, INNER, spread=INNER**-0.5)


def chosen(tokens: int, num_experts: int = EXPERTS) -> dict[str, Any]:
    ids = torch.rand(tokens, num_experts, device="cuda").argsort(dim=1)[:, :TOP_K].contiguous()
    weights = torch.rand(tokens, TOP_K, device="cuda")
    return {"weights": weights * 2.5 / weights.sum(dim=1, keepdim=True), "ids": ids, "num_shared": 1}


def in_fp32(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, named: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert by expert, nothing rounded but the inner activations, which the model's dtype defines; the sum, and the
    sum of its terms' sizes."""
    total, sizes = torch.zeros(2, *x.shape, device="cuda")
    for expert in range(w13.shape[0]):
        of_expert = named["ids"] == expert
        weight = torch.where(of_expert, named["weights"], 0.0).sum(dim=1)
        own = torch.nonzero(of_expert.any(dim=1)).flatten()
        if expert == w13.shape[0] - 1:
            weight, own = torch.ones_like(weight), torch.arange(x.shape[0], device="cuda")
        if own.numel():
            gate_up = x[own].float() @ w13[expert].float().T
            hidden = reference.swiglu(gate_up, limit=LIMIT).bfloat16().float()
            term = weight[own, None] * (hidden @ w2[expert].float().T)
            total[own] += term
            sizes[own] += term.abs()
    return total, sizes


PRODUCT_ERROR = 3e-5
"""Of gate and up: 256 steps of 16 terms in a tensor core, which cuts each sum, of order one, at 2**-23."""
SLOPE_TIMES_ULP = 0.0021
"""Mean of (|d hidden / d gate| + |d hidden / d up|) * (bf16 ulp of hidden) over four million normal gates and ups,
clamped at LIMIT."""
SQUARED_WEIGHTS = 4.0
"""Of a token: 1 for the shared expert, and 2.7 at most in 200,000 draws of ``chosen``."""


def assert_near_fp32(
    got: torch.Tensor, x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, named: dict[str, Any]
) -> None:
    """Element by element, with a bound that follows from what is rounded to bf16:

    - the result, once: BF16_OUTPUT of it;
    - beyond ``FP32_PARTIAL_TOKENS`` each expert's result before the weighted sum: BF16_OUTPUT of the sum of the terms'
      sizes, in the worst case that all err to the same side;
    - hidden, on both sides, from fp32 values that differ by PRODUCT_ERROR times their slope. That throws one of them
      over a rounding boundary with probability (difference / ulp), and then by one ulp: a variance of difference * ulp.
      INNER of these, each times an element of ``w2`` of variance 1 / INNER, times the squared routing weights: six
      standard deviations, since a test draws up to 6 million values.
    """
    want, sizes = in_fp32(x, w13, w2, named)
    bound = BF16_OUTPUT * want.abs()
    if x.shape[0] > FP32_PARTIAL_TOKENS:
        bound += BF16_OUTPUT * (1 + BF16_OUTPUT) * sizes
    bound += 6 * (PRODUCT_ERROR * SLOPE_TIMES_ULP * SQUARED_WEIGHTS) ** 0.5
    share = ((got.float() - want).abs() / bound).nan_to_num(nan=torch.inf)
    worst = float(share.max())
    assert worst <= 1, f"{int((share > 1).sum())} of {share.numel()} values are off, up to {worst:.2f} times the bound"


def replayed(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


@pytest.mark.parametrize("tokens", TOKENS)
def test_experts_equal_fp32_and_never_read_what_nobody_chose(w13: torch.Tensor, w2: torch.Tensor, tokens: int) -> None:
    x, named = draw(tokens, HIDDEN), chosen(tokens)
    named["ids"][named["ids"] == 11] = 64 - 1 if tokens > 64 else 12  # a place may repeat; 11 is chosen by nobody
    kept13, kept2 = w13[11].clone(), w2[11].clone()
    w13[11], w2[11] = torch.nan, torch.nan
    got = experts(x, w13, w2, **named, swiglu_limit=LIMIT)
    w13[11], w2[11] = kept13, kept2
    assert_near_fp32(got, x, w13, w2, named)


@pytest.mark.parametrize("tokens", TOKENS)
def test_experts_repeat_bit_for_bit_and_in_a_graph(w13: torch.Tensor, w2: torch.Tensor, tokens: int) -> None:
    x, named = draw(tokens, HIDDEN), chosen(tokens)
    other_x, other = draw(tokens, HIDDEN), chosen(tokens)

    def run() -> torch.Tensor:
        return experts(x, w13, w2, **named, swiglu_limit=LIMIT)

    want = run()
    assert all(torch.equal(run(), want) for _ in range(20))
    other_want = experts(other_x, w13, w2, **other, swiglu_limit=LIMIT)
    graph, out = replayed(run)
    graph.replay()
    assert torch.equal(out, want)
    x.copy_(other_x)
    for name in ("weights", "ids"):
        named[name].copy_(other[name])
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, other_want)


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("tiles", [tiles for _, tiles in EXPERT_TILES] + [MANY_ROWS, ONE_TOKEN])
def test_every_way_of_launching(
    w13: torch.Tensor, w2: torch.Tensor, tiles: ExpertTiles, described: bool, pdl: bool
) -> None:
    """Those that the table leaves out too. Calls follow each other in a graph, as kernels that overlap must."""
    tiles = replace(tiles, described=described, pdl=pdl)
    tokens = 1 if tiles.rows == 1 else 3 * tiles.rows
    from sidestream.ops.moe import triton_grouped, triton_one_token

    module = triton_one_token if tokens == 1 else triton_grouped
    inputs = [(draw(tokens, HIDDEN), chosen(tokens)) for _ in range(4)]

    def run() -> torch.Tensor:
        return torch.stack(
            [module.experts(x, w13, w2, **named, swiglu_limit=LIMIT, tiles=tiles) for x, named in inputs]
        )

    graph, out = replayed(run)
    for _ in range(5):
        out.fill_(torch.nan)
        graph.replay()
        for got, (x, named) in zip(out, inputs, strict=True):
            assert_near_fp32(got, x, w13, w2, named)


@pytest.mark.parametrize("tokens", [65, 700, 1500])
def test_products_by_warps_with_roles(w13: torch.Tensor, w2: torch.Tensor, tokens: int) -> None:
    """Rows with gaps between them, padding rows, an expert of many blocks, one that nobody chose; twice in a graph."""
    from sidestream.ops.moe import triton_grouped

    wide, named = draw(tokens, HIDDEN + 8), chosen(tokens)
    x = wide[:, :HIDDEN]
    named["ids"][named["ids"] == 11] = 12
    named["ids"][: tokens // 2, 0] = 3
    named["ids"][-2:], named["weights"][-2:] = -1, torch.nan
    kept13, kept2 = w13[11].clone(), w2[11].clone()
    w13[11], w2[11] = torch.nan, torch.nan

    def run() -> torch.Tensor:
        return triton_grouped.experts(x, w13, w2, **named, swiglu_limit=LIMIT, tiles=ROLES)

    graph, out = replayed(run)
    graph.replay()
    first = out.clone()
    out.fill_(torch.nan)
    graph.replay()
    w13[11], w2[11] = kept13, kept2
    assert torch.equal(out, first)
    assert_near_fp32(out, x, w13, w2, named)
    others = [t for t in range(tokens) if t != 3]
    x[others] = torch.nan
    assert torch.equal(run()[3], out[3])


@pytest.mark.parametrize("tokens", [5, 16, 40, 300])
def test_a_row_of_experts_depends_on_itself_alone(w13: torch.Tensor, w2: torch.Tensor, tokens: int) -> None:
    x, named = draw(tokens, HIDDEN), chosen(tokens)
    want = experts(x, w13, w2, **named, swiglu_limit=LIMIT)
    others = [t for t in range(tokens) if t != 3]
    x[others] = torch.nan
    named["ids"][others] = torch.arange(TOP_K, device="cuda")
    got = experts(x, w13, w2, **named, swiglu_limit=LIMIT)
    assert torch.equal(got[3], want[3])


@pytest.mark.parametrize("tokens", [1, 4, 40, 700])
def test_an_id_of_minus_one_takes_no_expert(w13: torch.Tensor, w2: torch.Tensor, tokens: int) -> None:
    x, named = draw(tokens, HIDDEN), chosen(tokens)
    named["ids"][tokens // 2 :] = -1
    named["weights"][tokens // 2 :] = torch.nan
    got = experts(x, w13, w2, **named, swiglu_limit=LIMIT)
    assert_near_fp32(got, x, w13, w2, named)


@pytest.mark.parametrize("tokens", [1, 6])
def test_experts_beyond_2_to_the_31_elements(tokens: int) -> None:
    total = 161  # 2.7e9 elements of w13
    w13, w2 = draw(total, 2 * INNER, HIDDEN, spread=HIDDEN**-0.5), draw(total, HIDDEN, INNER, spread=INNER**-0.5)
    x, named = draw(tokens, HIDDEN), chosen(tokens, total - 1)
    named["ids"][:, 0], named["ids"][:, 1:] = total - 2, torch.arange(7, device="cuda")
    got = experts(x, w13, w2, **named, swiglu_limit=LIMIT)
    assert_near_fp32(got, x, w13, w2, named)


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 16, 64, 256, 300])
@pytest.mark.parametrize(("num_experts", "groups", "kept"), [(64, 1, 1), (288, 1, 1), (256, 8, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_route_equals_fp64(tokens: int, num_experts: int, groups: int, kept: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, HIDDEN, device="cuda").to(dtype)
    weight = torch.randn(num_experts, HIDDEN, device="cuda") / HIDDEN**0.5
    bias = torch.randn(num_experts, device="cuda") * 0.3
    shape = {"top_k": TOP_K, "num_groups": groups, "topk_groups": kept}
    weights, ids = route(x, weight, bias, **shape, norm_topk_prob=True, scale=2.5)
    scores = torch.sigmoid(x.double() @ weight.double().T)
    biased = scores + bias.double()
    if kept < groups:
        biased = torch_impl._keep_best_groups(biased, groups, kept)
    best = biased.sort(dim=1, descending=True).values[:, :TOP_K]
    torch.testing.assert_close(biased.gather(1, ids), best, rtol=0, atol=FP32_GEMM)
    own = scores.gather(1, ids)
    want = 2.5 * own / own.sum(dim=1, keepdim=True)
    torch.testing.assert_close(weights.double(), want, rtol=0, atol=FP32_GEMM)
    again = route(x, weight, bias, **shape, norm_topk_prob=True, scale=2.5)
    assert torch.equal(again[0], weights)
    assert torch.equal(again[1], ids)


@pytest.mark.parametrize("tokens", [1, 16, 64, 300])
def test_route_breaks_ties_by_id_and_survives_garbage(tokens: int) -> None:
    shape = {"top_k": TOP_K, "num_groups": 1, "topk_groups": 1, "norm_topk_prob": True, "scale": 1.0}
    bias = 7 + torch.arange(288, device="cuda") * 1e-3
    weight = torch.zeros(288, HIDDEN, device="cuda")
    x = draw(tokens, HIDDEN)
    _, ids = route(x, weight, bias, **shape)
    assert ids.tolist() == [list(range(287, 279, -1))] * tokens
    _, ids = route(x, weight, torch.zeros(288, device="cuda"), **shape)
    assert ids.tolist() == [list(range(8))] * tokens
    weight.normal_()
    clean = route(x, weight, bias, **shape)
    x[-1] = torch.nan
    weights, ids = route(x, weight, bias, **shape)
    assert torch.equal(ids[:-1], clean[1][:-1])
    assert torch.equal(weights[:-1], clean[0][:-1])
    assert sorted(ids[-1].tolist()) == list(range(8)), "all are equally bad"


@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_route_in_a_graph(tokens: int) -> None:
    x, weight, bias = draw(tokens, HIDDEN), torch.randn(288, HIDDEN, device="cuda"), torch.randn(288, device="cuda")
    shape = {"top_k": TOP_K, "num_groups": 1, "topk_groups": 1, "norm_topk_prob": True, "scale": 1.0}
    graph, out = replayed(lambda: torch.cat(route(x, weight, bias, **shape), dim=1))
    for _ in range(3):
        x.normal_()
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, torch.cat(route(x, weight, bias, **shape), dim=1))


@pytest.mark.parametrize(("tokens", "inner"), [(1, 12288), (64, 12288), (8192, 2048), (70_000, 96)])
@pytest.mark.parametrize("limit", [None, LIMIT])
def test_swiglu_equals_the_formula(tokens: int, inner: int, limit: float | None) -> None:
    gate_up = draw(tokens, 2 * inner)
    got = swiglu(gate_up, limit=limit)
    torch.testing.assert_close(got, reference.swiglu(gate_up, limit=limit), rtol=2 * BF16_OUTPUT, atol=FP32_ROUNDING)
