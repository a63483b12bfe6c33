"""Placeholders are replaced by what was sampled, everything else stays."""

from __future__ import annotations

import pytest
import torch

from sidestream.ops.sampled_tokens import fill_sampled
from sidestream.ops.sampled_tokens.reference import fill_sampled as reference
from tests.ops.triton_mode import DEVICE


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_as_the_reference(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    sampled = torch.randint(0, 5000, (9,), generator=generator)
    sources = torch.randint(-1, 9, (rows,), generator=generator)
    ids = torch.randint(0, 5000, (rows,), generator=generator)
    expected = ids.clone()
    reference(expected, sources, sampled)
    fill_sampled(ids, sources, sampled)
    assert torch.equal(ids, expected)


def test_known_tokens_stay_whatever_was_sampled() -> None:
    ids = torch.tensor([4, 5, 6])
    fill_sampled(ids, torch.tensor([-1, 0, -1]), torch.tensor([77]))
    assert ids.tolist() == [4, 77, 6]


@pytest.mark.parametrize("rows", [0, 1, 64, 300])
def test_the_triton_kernel(rows: int) -> None:
    from sidestream.ops.sampled_tokens import triton_fill

    generator = torch.Generator().manual_seed(rows)
    sampled = torch.randint(0, 5000, (9,), generator=generator)
    sources = torch.randint(-1, 9, (rows,), generator=generator)
    ids = torch.randint(0, 5000, (rows,), generator=generator)
    expected = ids.clone()
    reference(expected, sources, sampled)
    ids, sources, sampled = (tensor.to(DEVICE) for tensor in (ids, sources, sampled))
    triton_fill.fill_sampled(ids, sources, sampled)
    assert torch.equal(ids.cpu(), expected)
