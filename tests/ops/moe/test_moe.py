"""Router, experts and SwiGLU against transformers and token by token; ties, extreme biases, garbage rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32TopkRouter
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextExperts, Glm5NextTextMLP

from sidestream.ops.moe import experts, reference, route, swiglu, torch_impl
from tests.tolerances import BF16_OUTPUT, BF16_STEPS, FP32_GEMM, FP32_ROUNDING

DTYPES = [torch.float32, torch.bfloat16]
ONE_GROUP: dict[str, Any] = {"num_groups": 1, "topk_groups": 1, "norm_topk_prob": True, "scale": 2.5}


def random_router(num_experts: int, hidden: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_experts, hidden, generator=gen) / hidden**0.5
    return weight, torch.randn(num_experts, generator=gen) * 0.3


@pytest.mark.parametrize(("num_groups", "topk_groups"), [(1, 1), (4, 2), (8, 3), (4, 4)])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_route_equals_transformers(num_groups: int, topk_groups: int, norm_topk_prob: bool, dtype: torch.dtype) -> None:
    config = DeepseekV32Config(
        hidden_size=24,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=num_groups,
        topk_group=topk_groups,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=2.5,
    )
    oracle = DeepseekV32TopkRouter(config)
    weight, bias = random_router(16, 24)
    x = torch.randn(50, 24).to(dtype)
    with torch.no_grad():
        oracle.weight.copy_(weight)
        oracle.e_score_correction_bias.copy_(bias)
        _, want_weights, want_ids = oracle(x)
    choice: dict[str, Any] = {
        "top_k": 4,
        "num_groups": num_groups,
        "topk_groups": topk_groups,
        "norm_topk_prob": norm_topk_prob,
        "scale": 2.5,
    }
    weights, ids = route(x, weight, bias, **choice)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int64
    order = want_ids.sort(dim=1).indices
    mine = ids.sort(dim=1).indices
    assert torch.equal(ids.gather(1, mine), want_ids.gather(1, order))
    torch.testing.assert_close(weights.gather(1, mine), want_weights.gather(1, order), rtol=0, atol=FP32_ROUNDING)
    ref_weights, ref_ids = reference.route(x, weight, bias, **choice)
    assert torch.equal(ids, ref_ids)
    torch.testing.assert_close(weights, ref_weights, rtol=0, atol=FP32_ROUNDING)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_biases_a_thousandth_apart_select_as_fp32(dtype: torch.dtype) -> None:
    """7 + i / 1000 are a few values in bf16 and all distinct in fp32; weights come from the unbiased scores."""
    weight = torch.zeros(64, 16)
    weight[:, 0] = torch.linspace(-1e-4, 1e-4, 64).flip(0)  # scores run against the bias, and are much closer together
    bias = 7 + torch.arange(64) * 1e-3
    x = torch.ones(3, 16).to(dtype)
    weights, ids = route(x, weight, bias, top_k=8, **ONE_GROUP)
    assert ids.tolist() == [list(range(63, 55, -1))] * 3
    torch.testing.assert_close(weights.sum(1), torch.full((3,), 2.5), rtol=0, atol=FP32_ROUNDING)
    torch.testing.assert_close(weights, torch.full((3, 8), 2.5 / 8), rtol=0, atol=1e-4)
    unscaled, _ = route(x, weight, bias, top_k=8, num_groups=1, topk_groups=1, norm_topk_prob=False, scale=1.0)
    torch.testing.assert_close(unscaled, torch.full((3, 8), 0.5), rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_experts", [8, 256])
@pytest.mark.parametrize("tokens", [1, 8, 500])
def test_ties_go_to_the_lowest_id(num_experts: int, tokens: int) -> None:
    weight, bias = torch.zeros(num_experts, 4), torch.zeros(num_experts)
    bias[5] = 1.0
    _, ids = route(torch.randn(tokens, 4), weight, bias, top_k=4, **ONE_GROUP)
    assert ids.tolist() == [[5, 0, 1, 2]] * tokens
    _, ids = route(
        torch.randn(tokens, 4),
        weight,
        torch.zeros(num_experts),
        top_k=3,
        num_groups=4,
        topk_groups=2,
        norm_topk_prob=True,
        scale=1.0,
    )
    first_groups = list(range(min(3, num_experts // 2)))
    assert ids.tolist() == [first_groups] * tokens


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 6),
    per_group=st.integers(2, 4),
    num_groups=st.sampled_from([1, 2, 4]),
    data=st.data(),
)
def test_route_under_many_ties_equals_a_sort(tokens: int, per_group: int, num_groups: int, data: st.DataObject) -> None:
    topk_groups = data.draw(st.integers(1, num_groups))
    top_k = data.draw(st.integers(1, topk_groups * per_group))
    levels = st.sampled_from([-2.0, -0.5, 0.0, 0.5, 3.0])
    bias = torch.tensor(data.draw(st.lists(levels, min_size=num_groups * per_group, max_size=num_groups * per_group)))
    weight = torch.zeros(num_groups * per_group, 4)
    choice: dict[str, Any] = {
        "top_k": top_k,
        "num_groups": num_groups,
        "topk_groups": topk_groups,
        "norm_topk_prob": True,
        "scale": 1.0,
    }
    x = torch.ones(tokens, 4)
    assert torch.equal(route(x, weight, bias, **choice)[1], reference.route(x, weight, bias, **choice)[1])


def random_experts(
    num_experts: int, hidden: int, intermediate: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(3)
    w13 = torch.randn(num_experts, 2 * intermediate, hidden, generator=gen) / hidden**0.5
    w2 = torch.randn(num_experts, hidden, intermediate, generator=gen) / intermediate**0.5
    return w13.to(dtype), w2.to(dtype)


def with_shared(w13: torch.Tensor, w2: torch.Tensor, num_shared: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Shared experts behind the others, small enough that sums stay of order one."""
    more13, more2 = random_experts(num_shared, w13.shape[2], w2.shape[2], w13.dtype)
    return torch.cat((w13, -more13)), torch.cat((w2, more2 / 4))


def random_choice(tokens: int, num_experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, num_experts, generator=gen).argsort(dim=1)[:, :top_k]
    return torch.rand(tokens, top_k, generator=gen), ids


@pytest.mark.parametrize(("hidden", "intermediate"), [(32, 20), (48, 16), (30, 7)])  # the last one grouped_mm refuses
@pytest.mark.parametrize("num_shared", [0, 1, 2])
@pytest.mark.parametrize("tokens", [0, 1, 2, 4, 16, 17, 32, 33, 150])  # dense: 8 to 32 pairs; by host: to 64
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [None, 0.4])
def test_experts_equal_transformers(
    hidden: int, intermediate: int, num_shared: int, tokens: int, dtype: torch.dtype, limit: float | None
) -> None:
    config = Glm5NextTextConfig(
        hidden_size=hidden,
        moe_intermediate_size=intermediate,
        n_routed_experts=8,
        swiglu_limit=limit if limit is not None else 1e9,
        experts_implementation="eager",
    )
    oracle = Glm5NextTextExperts(config).to(dtype)
    w13, w2 = random_experts(8, hidden, intermediate, dtype)
    x = (torch.randn(tokens, hidden) * 0.6).to(dtype)
    weights, ids = random_choice(tokens, 8, 2)
    width = num_shared * intermediate
    w13, w2 = with_shared(w13, w2, num_shared)
    gate_rows, up_rows = w13[8:].view(num_shared, 2, intermediate, hidden).unbind(1)
    with torch.no_grad():
        oracle.gate_up_proj.copy_(w13[:8])
        oracle.down_proj.copy_(w2[:8])
        want = oracle(x, ids, weights)
        if num_shared:
            oracle_shared = Glm5NextTextMLP(config, intermediate_size=width).to(dtype)
            oracle_shared.gate_proj.weight.copy_(gate_rows.reshape(width, hidden))
            oracle_shared.up_proj.weight.copy_(up_rows.reshape(width, hidden))
            oracle_shared.down_proj.weight.copy_(w2[8:].transpose(0, 1).reshape(hidden, width))
            want = want + oracle_shared(x)
    got = experts(x, w13, w2, num_shared=num_shared, weights=weights, ids=ids, swiglu_limit=limit)
    assert got.dtype == dtype
    exact = dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0, atol=FP32_GEMM if exact else 2 * BF16_STEPS)
    if tokens <= 16:
        want = reference.experts(x, w13, w2, num_shared=num_shared, weights=weights, ids=ids, swiglu_limit=limit)
        torch.testing.assert_close(got, want, rtol=0, atol=FP32_GEMM if exact else BF16_STEPS)


@pytest.mark.parametrize(("hidden", "intermediate"), [(32, 20), (30, 7)])
@pytest.mark.parametrize("tokens", [5, 12, 60])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_a_garbage_token_hurts_no_other(hidden: int, intermediate: int, tokens: int, poison: float) -> None:
    w13, w2 = random_experts(4, hidden, intermediate, torch.float32)
    w13, w2 = with_shared(w13, w2, 1)
    router, bias = random_router(4, hidden)
    x = torch.randn(tokens, hidden)
    clean_weights, clean_ids = route(x, router, bias, top_k=2, **ONE_GROUP)
    clean = experts(x, w13, w2, num_shared=1, weights=clean_weights, ids=clean_ids, swiglu_limit=7.0)
    x[4] = poison
    weights, ids = route(x, router, bias, top_k=2, **ONE_GROUP)
    keep = [t for t in range(tokens) if t != 4]
    assert torch.equal(ids[keep], clean_ids[keep])
    assert bool(((ids >= 0) & (ids < 4)).all()), "a NaN row must still name experts"
    got = experts(x, w13, w2, num_shared=1, weights=weights, ids=ids, swiglu_limit=7.0)
    torch.testing.assert_close(got[keep], clean[keep], rtol=0, atol=FP32_GEMM)


@pytest.mark.parametrize("tokens", [1, 5, 39])
def test_experts_that_nobody_chose_are_not_read(tokens: int) -> None:
    """Where rows are fewer than experts, or many. (In between all are, times zero.)"""
    w13, w2 = random_experts(12, 32, 20, torch.float32)
    w13, w2 = with_shared(w13, w2, 1)
    weights, _ = random_choice(tokens, 12, 2)
    ids = torch.tensor([[1, 4], [4, 1]] * tokens)[:tokens]
    x = torch.ones(tokens, 32)
    clean = experts(x, w13, w2, num_shared=1, weights=weights, ids=ids, swiglu_limit=None)
    for expert in (0, 2, 3, 5, 11):
        w13[expert], w2[expert] = float("nan"), float("nan")
    assert torch.equal(experts(x, w13, w2, num_shared=1, weights=weights, ids=ids, swiglu_limit=None), clean)


@pytest.mark.parametrize("tokens", [2, 7, 200])
def test_the_same_call_gives_the_same_bits(tokens: int) -> None:
    w13, w2 = random_experts(8, 64, 40, torch.float32)
    w13, w2 = with_shared(w13, w2, 1)
    router, bias = random_router(8, 64)
    x = torch.randn(tokens, 64)
    weights, ids = route(x, router, bias, top_k=2, **ONE_GROUP)
    first = experts(x, w13, w2, num_shared=1, weights=weights, ids=ids, swiglu_limit=7.0)
    for _ in range(5):
        again = route(x.clone(), router, bias, top_k=2, **ONE_GROUP)
        got = experts(x.clone(), w13, w2, num_shared=1, weights=again[0], ids=again[1], swiglu_limit=7.0)
        assert torch.equal(got, first)


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_few_rows_and_many_choose_alike(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    router, bias = random_router(16, 32)
    x = torch.randn(torch_impl.FEW_ROWS // top_k, 32)
    few = route(x, router, bias, top_k=top_k, **ONE_GROUP)
    monkeypatch.setattr(torch_impl, "FEW_ROWS", 0)
    many = route(x, router, bias, top_k=top_k, **ONE_GROUP)
    assert torch.equal(few[1], many[1])
    torch.testing.assert_close(few[0], many[0], rtol=0, atol=FP32_ROUNDING)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [None, 1.5])
def test_swiglu_equals_the_formula(dtype: torch.dtype, limit: float | None) -> None:
    gate_up = (torch.randn(5, 80)[:, ::2] * 3).to(dtype)
    gate_up[0, :4] = torch.tensor([-30.0, 30.0, 1.5, -1.5])
    before = gate_up.clone()
    got = swiglu(gate_up, limit=limit)
    want = reference.swiglu(gate_up, limit=limit)
    # bf16: silu is rounded before the product
    torch.testing.assert_close(got, want, rtol=3 * BF16_OUTPUT if dtype == torch.bfloat16 else FP32_ROUNDING, atol=1e-6)
    assert torch.equal(gate_up, before)
