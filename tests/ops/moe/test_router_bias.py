"""Router biases a thousandth apart, far from zero: for few rows, which a CPU takes to numpy, and for many."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sidestream.ops.moe import device_impl, route
from tests.tolerances import FP32_ROUNDING

EXPERTS, TOP_K, SCALE = 64, 8, 2.5


@pytest.mark.parametrize("function", [route, device_impl.route], ids=["operator", "device"])
@pytest.mark.parametrize("tokens", [1, 8, 9, 300])
@pytest.mark.parametrize(("num_groups", "topk_groups"), [(1, 1), (4, 2)])
def test_the_choice_is_that_of_fp32_and_weights_are_unbiased(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]], tokens: int, num_groups: int, topk_groups: int
) -> None:
    """Scores run against the bias, by less, so the choice is the bias's; in bf16 all biases here are one of two."""
    weight = torch.zeros(EXPERTS, 16)
    weight[:, 0] = torch.linspace(-2e-3, 2e-3, EXPERTS).flip(0)
    weights, ids = function(
        torch.ones(tokens, 16, dtype=torch.bfloat16),
        weight,
        7 + torch.arange(EXPERTS) * 1e-3,
        top_k=TOP_K,
        num_groups=num_groups,
        topk_groups=topk_groups,
        norm_topk_prob=True,
        scale=SCALE,
    )
    chosen = list(range(EXPERTS - 1, EXPERTS - 1 - TOP_K, -1))
    assert ids.tolist() == [chosen] * tokens
    unbiased = weight[chosen, 0].sigmoid()
    want = (SCALE * unbiased / unbiased.sum()).expand(tokens, TOP_K)
    torch.testing.assert_close(weights, want, rtol=0, atol=FP32_ROUNDING)
