"""Infinities are scores of their own: above and below the largest finite ones, in every implementation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sidestream.ops.topk import reference, topk_ascending, triton_select
from tests.ops.triton_mode import DEVICE

MAX = torch.finfo(torch.float32).max


@pytest.mark.usefixtures("either_library")
@pytest.mark.parametrize("function", [topk_ascending, triton_select.topk_ascending], ids=["torch", "triton"])
@pytest.mark.parametrize("size", [8, 2000])
def test_the_largest_numbers_are_no_infinities(function: Callable[..., torch.Tensor], size: int) -> None:
    scores = torch.full((3, size), -torch.inf)
    scores[0, [2, 3, 4]] = torch.tensor([MAX, torch.inf, MAX])
    scores[1, 5] = -MAX
    scores[2] = MAX
    scores[2, -1] = torch.inf
    valid = torch.full((3,), size)
    got = function(scores.to(DEVICE), valid.to(DEVICE), 1).cpu()
    assert got.tolist() == [[3], [5], [size - 1]]
    assert torch.equal(got, reference.topk_ascending(scores, valid, 1))
