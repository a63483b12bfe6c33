"""Deterministic top-k: ties, extremes and lengths, on both sides of the switch from sorting to keys."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.ops.topk import reference, topk_ascending

pytestmark = pytest.mark.usefixtures("either_library")
INF, NAN = math.inf, math.nan
BYTES_OF_A_SORT = 1024
"""Entries from which the fast path builds keys; rows are repeated to get there."""


def check(scores: torch.Tensor, valid: torch.Tensor, k: int) -> torch.Tensor:
    """Both paths against the reference, twice; entries behind ``valid`` must not matter."""
    want = reference.topk_ascending(scores, valid, k)
    repeats = BYTES_OF_A_SORT // max(scores.numel(), 1) + 1
    for times in (1, repeats):
        many, many_valid = scores.repeat(times, 1), valid.repeat(times)
        got = topk_ascending(many, many_valid, k)
        assert got.dtype == torch.int32
        assert torch.equal(got, want.repeat(times, 1)), (got[: len(want)], want)
        assert torch.equal(topk_ascending(many, many_valid, k), got)
    for poison in (NAN, INF, 1e30, -INF):
        hidden = torch.arange(scores.shape[1]) >= valid[:, None]
        assert torch.equal(topk_ascending(scores.masked_fill(hidden, poison), valid, k), want)
    return want


VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e6, -1e6, INF, -INF, NAN, -NAN, 1e-45, -1e-45, 3.4e38, -3.4e38, 0.5])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_extreme_values_against_reference(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 24))
    rows = data.draw(st.lists(st.lists(VALUES, min_size=size, max_size=size), min_size=1, max_size=3))
    valid = data.draw(st.lists(st.integers(0, size), min_size=len(rows), max_size=len(rows)))
    check(torch.tensor(rows), torch.tensor(valid), data.draw(st.integers(1, size + 3)))


@pytest.mark.parametrize("k", [7, 8, 9])
def test_lengths_around_k(k: int) -> None:
    scores = torch.randn(9, 12).round(decimals=1)
    for length in (0, 1, k - 1, k, k + 1, 12):
        picked = check(scores, torch.full((9,), min(length, 12)), k)
        assert ((picked >= 0).sum(dim=1) == min(k, length)).all()


def test_distinct_among_thousands_of_zeros() -> None:
    scores = torch.zeros(1, 8320)
    where = torch.randperm(8320)[:100]
    scores[0, where] = torch.randperm(100).float() + 1
    picked = check(scores, torch.tensor([8320]), 512)[0]
    assert set(where.tolist()) <= set(picked.tolist())
    zeros = [i for i in picked.tolist() if i not in set(where.tolist())]
    lowest = [i for i in range(8320) if i not in set(where.tolist())][:412]
    assert zeros == lowest


@pytest.mark.parametrize("value", [0.0, -0.0, 1e6, -1e6, -INF, INF, NAN])
def test_all_equal_takes_the_lowest(value: float) -> None:
    picked = topk_ascending(torch.full((3, 3000), value), torch.tensor([3000, 40, 3]), 16)
    assert picked[0].tolist() == list(range(16))
    assert picked[1].tolist() == list(range(16))
    assert picked[2].tolist() == [0, 1, 2] + [-1] * 13


def test_signed_zeros_are_ties() -> None:
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0] * 500])
    assert topk_ascending(scores, torch.tensor([2000]), 5).tolist() == [[0, 1, 2, 3, 4]]


def test_all_minus_infinity_but_five() -> None:
    scores = torch.full((1, 4096), -INF)
    five = [17, 900, 901, 3000, 4095]
    scores[0, five] = torch.tensor([-3e38, 5.0, 5.0, 0.0, 1.0])
    picked = check(scores, torch.tensor([4096]), 8)[0].tolist()
    assert picked == sorted([*five, 0, 1, 2])


def test_nan_ranks_below_minus_infinity() -> None:
    scores = torch.tensor([[NAN, -INF, -NAN, -INF, NAN]])
    assert check(scores, torch.tensor([5]), 3).tolist() == [[0, 1, 3]]


def test_large_magnitudes() -> None:
    scores = torch.randn(4, 2000) * 1e6
    check(scores, torch.tensor([2000, 1999, 64, 63]), 64)


def test_rows_do_not_depend_on_each_other() -> None:
    scores = torch.randn(40, 700).round(decimals=1)
    valid = torch.randint(0, 701, (40,))
    together = topk_ascending(scores, valid, 32)
    alone = torch.cat([topk_ascending(scores[i : i + 1], valid[i : i + 1], 32) for i in range(40)])
    assert torch.equal(together, alone)


def test_strides_and_empty_shapes() -> None:
    wide = torch.randn(6, 90)
    scores, valid = wide[::2, ::3], torch.tensor([30, 9, 0, 7, 8, 9])[::2]
    assert torch.equal(topk_ascending(scores, valid, 10), reference.topk_ascending(scores, valid, 10))
    column = torch.randn(50, 3).t()
    assert torch.equal(topk_ascending(column, valid, 4), reference.topk_ascending(column, valid, 4))
    assert topk_ascending(torch.randn(2, 0), torch.zeros(2, dtype=torch.int64), 3).tolist() == [[-1] * 3] * 2
    assert topk_ascending(torch.randn(0, 5), torch.zeros(0, dtype=torch.int64), 3).shape == (0, 3)
