"""Products of heads with weights of their own, and where they are written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sidestream.ops.linear import by_head, reference, torch_impl
from tests.ops.triton_mode import DEVICE
from tests.tolerances import BF16_OUTPUT, FP32_GEMM


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_equals_the_formula(tokens: int, turned: bool, dtype: torch.dtype) -> None:
    """Queries are a slice of wider rows; the second weight of a layer is turned in memory, and one of two parts."""
    x = torch.randn(tokens, 90).to(dtype)[:, 10:70].view(tokens, 5, 12)
    weight = torch.randn(5, 40, 12).to(dtype)[:, 8:].transpose(1, 2) if turned else torch.randn(5, 12, 32).to(dtype)
    want = reference.by_head(x, weight)
    for function in (torch_impl.by_head, torch_impl.by_head_in_place):
        got = function(x.to(DEVICE), weight.to(DEVICE)).cpu()
        assert got.dtype == dtype
        rounding = 0.0 if dtype == torch.float32 else 2 * BF16_OUTPUT
        torch.testing.assert_close(got.float(), want, rtol=rounding, atol=FP32_GEMM)


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("function", [torch_impl.by_head_into, torch_impl.write_by_head])
def test_writes_a_part_of_wider_heads(function: Callable[..., None], tokens: int) -> None:
    x, weight = torch.randn(tokens, 5, 12).to(DEVICE), torch.randn(5, 12, 32).to(DEVICE)
    whole = torch.full((tokens, 5, 40), torch.nan, device=DEVICE)
    function(x, weight, out=whole[..., :32])
    torch.testing.assert_close(whole[..., :32], reference.by_head(x, weight), rtol=0, atol=FP32_GEMM)
    assert bool(whole[..., 32:].isnan().all()), "what lies beside was written"


def test_in_place_is_contiguous() -> None:
    x, weight = torch.randn(7, 5, 12), torch.randn(5, 12, 32)
    assert torch_impl.by_head_in_place(x, weight).is_contiguous()
    assert torch.equal(by_head(x, weight), torch_impl.by_head(x, weight)), "a CPU keeps its own way"
