"""Experts without host reads, run on a CPU: against token by token, and no row's bits depend on another's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestream.ops.moe import device_impl, experts, reference
from tests.ops.moe.test_moe import random_choice, random_experts, with_shared
from tests.tolerances import BF16_STEPS, FP32_GEMM, FP32_ROUNDING

BOTH = [device_impl.grouped, device_impl.expert_by_expert]


def inputs(tokens: int, dtype: torch.dtype, *, num_shared: int = 1) -> tuple[torch.Tensor, dict[str, Any]]:
    w13, w2 = with_shared(*random_experts(8, 32, 24, dtype), num_shared)
    weights, ids = random_choice(tokens, 8, 3)
    x = (torch.randn(tokens, 32) * 0.6).to(dtype)
    named = {"w13": w13, "w2": w2, "weights": weights, "ids": ids, "num_shared": num_shared, "swiglu_limit": 0.7}
    return x, named


@pytest.mark.parametrize("run", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_shared", [0, 1, 2])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_equals_token_by_token(run: Any, dtype: torch.dtype, num_shared: int, tokens: int) -> None:
    x, named = inputs(tokens, dtype, num_shared=num_shared)
    got = run(x, **named)
    assert got.dtype == dtype
    atol = FP32_GEMM if dtype == torch.float32 else BF16_STEPS
    torch.testing.assert_close(got, reference.experts(x, **named), rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_depend_on_the_row_alone(dtype: torch.dtype) -> None:
    x, named = inputs(24, dtype)
    want = device_impl.expert_by_expert(x, **named)
    others = {**named, "ids": named["ids"].clone(), "weights": named["weights"].clone()}
    kept = torch.arange(0, 24, 5)
    moved = [t for t in range(24) if t % 5]
    others["ids"][moved] = torch.tensor([7, 0, 3])
    others["weights"][moved] = torch.nan
    noise = torch.full_like(x, torch.inf)
    noise[kept] = x[kept]
    got = device_impl.expert_by_expert(noise, **others)
    assert torch.equal(got[kept], want[kept])
    assert not torch.equal(got[moved], want[moved])


@pytest.mark.parametrize("run", BOTH)
def test_an_expert_that_was_not_chosen_may_overflow(run: Any) -> None:
    x, named = inputs(6, torch.float32, num_shared=1)
    named["ids"] = torch.tensor([[1, 4, 6]]).repeat(6, 1)
    clean = run(x, **named)
    named["w2"] = named["w2"].clone()
    named["w2"][2] = torch.inf
    named["w2"][7] = torch.nan
    assert torch.equal(run(x, **named), clean)


def test_devices_have_one_each() -> None:
    assert experts.implementations["cuda"] is device_impl.grouped_where_possible
    assert experts.implementations["sim"] is device_impl.expert_by_expert
    x, named = inputs(9, torch.bfloat16)
    elsewhere = device_impl.grouped_where_possible(x, **named)  # a CPU is no CUDA device: expert by expert
    assert torch.equal(elsewhere, device_impl.expert_by_expert(x, **named))


@pytest.mark.parametrize("scratch_bytes", [1, 2000, 1 << 20])
def test_the_sum_may_be_cut_anywhere(scratch_bytes: int) -> None:
    chosen, weights = torch.randn(11, 3, 20).bfloat16(), torch.rand(11, 3)
    got = device_impl.weighted_sum(chosen, weights, scratch_bytes=scratch_bytes)
    want = (chosen.float() * weights[:, :, None]).sum(dim=1)
    torch.testing.assert_close(got, want, rtol=0, atol=FP32_ROUNDING)
