"""Norms against their formulas, against transformers' modules, and with strided or poisoned input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextRMSNorm, Glm5NextTextRMSNormGated

from sidestream.ops.norm import gated_rms_norm, layer_norm, reference, rms_norm
from tests.tolerances import BF16_OUTPUT, FP32_ROUNDING

DTYPES = [torch.float32, torch.bfloat16]


def relative(dtype: torch.dtype) -> float:
    return FP32_ROUNDING if dtype == torch.float32 else 2 * BF16_OUTPUT  # one ulp: the fp32 values may straddle a tie


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (5, 3, 32), (0, 16), (2, 5120)])
def test_rms_norm_equals_transformers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 3).to(dtype)
    oracle = Glm5NextTextRMSNorm(shape[-1], eps=1e-5).to(dtype)
    with torch.no_grad():
        oracle.weight.copy_(torch.rand(shape[-1]) + 0.5)
        want = oracle(x)
    weight = oracle.weight.detach()
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=relative(dtype), atol=FP32_ROUNDING)
    torch.testing.assert_close(got, reference.rms_norm(x, weight, 1e-5), rtol=relative(dtype), atol=FP32_ROUNDING)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 9), width=st.integers(1, 70), size=st.sampled_from([1e-6, 1e-3, 1.0, 1e4]))
def test_rms_norm_at_any_size_of_values(rows: int, width: int, size: float) -> None:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(width)) * size
    weight = torch.linspace(-1, 2, width)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), rtol=FP32_ROUNDING, atol=FP32_ROUNDING
    )


def test_rms_norm_of_a_slice_leaves_its_input_and_its_neighbours_alone() -> None:
    wide = torch.full((6, 40), float("nan"))
    wide[:, 10:26] = torch.randn(6, 16)
    before = wide.clone()
    x = wide[:, 10:26]
    got = rms_norm(x, torch.ones(16), 1e-5)
    torch.testing.assert_close(
        got, reference.rms_norm(x.contiguous(), torch.ones(16), 1e-5), rtol=0, atol=FP32_ROUNDING
    )
    assert torch.equal(wide.nan_to_num(7.0), before.nan_to_num(7.0))


def test_garbage_in_one_row_stays_there() -> None:
    x = torch.randn(8, 32)
    clean = rms_norm(x, torch.ones(32), 1e-5)
    x[2] = float("nan")
    x[5] = 1e30
    keep = [0, 1, 3, 4, 6, 7]
    assert torch.equal(rms_norm(x, torch.ones(32), 1e-5)[keep], clean[keep])


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_equals_the_formula(dtype: torch.dtype) -> None:
    x = (torch.randn(7, 64)[:, ::2] * 2 + 1).to(dtype)
    weight, bias = torch.rand(32).add(0.5).to(dtype), torch.randn(32).to(dtype)
    torch.testing.assert_close(
        layer_norm(x, weight, bias, eps=1e-6),
        reference.layer_norm(x, weight, bias, eps=1e-6),
        rtol=relative(dtype),
        atol=2 * FP32_ROUNDING if dtype == torch.float32 else BF16_OUTPUT,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_gated_rms_norm_equals_transformers(tokens: int, dtype: torch.dtype) -> None:
    x, gate = torch.randn(tokens, 4, 24).to(dtype), torch.randn(tokens, 4, 48).to(dtype)[..., ::2] * 4
    oracle = Glm5NextTextRMSNormGated(24, eps=1e-5)
    with torch.no_grad():
        oracle.weight.copy_(torch.rand(24) + 0.5)
        want = oracle(x, gate)
    weight = oracle.weight.detach()
    got = gated_rms_norm(x, gate, weight, eps=1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=relative(dtype), atol=FP32_ROUNDING)
    torch.testing.assert_close(
        got, reference.gated_rms_norm(x, gate, weight, eps=1e-5), rtol=relative(dtype), atol=FP32_ROUNDING
    )
