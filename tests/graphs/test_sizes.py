"""Captured sizes: every batch has one, and is padded by no more than the documentation says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestream.graphs.sizes import capture_sizes, padded_size

LIMITS = st.integers(1, 20_000)


@given(LIMITS)
def test_sizes_ascend_and_end_at_the_limit(limit: int) -> None:
    sizes = capture_sizes(limit)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == limit


@given(LIMITS, st.data())
def test_every_batch_up_to_the_limit_has_the_smallest_size_that_holds_it(limit: int, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, limit))
    sizes = capture_sizes(limit)
    size = padded_size(rows, sizes)
    assert size == min(s for s in sizes if s >= rows)
    assert padded_size(limit + 1, sizes) is None


@given(LIMITS, st.data())
def test_padding_is_bounded(limit: int, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, limit))
    size = padded_size(rows, capture_sizes(limit))
    assert size is not None
    if rows > 8:
        assert size - rows < max(8, rows / 4)
    else:
        assert size == min(next(s for s in (1, 2, 4, 8) if s >= rows), limit)


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (9, (1, 2, 4, 8, 9)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (100, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)),
    ],
)
def test_known_sizes(limit: int, sizes: tuple[int, ...]) -> None:
    assert capture_sizes(limit) == sizes


def test_from_64_on_there_are_four_sizes_a_doubling() -> None:
    sizes = capture_sizes(1 << 14)
    for start in (64, 128, 1024, 8192):
        assert sum(start <= size < 2 * start for size in sizes) == 4


def test_no_step_has_no_rows() -> None:
    with pytest.raises(AssertionError, match="no step has 0 rows"):
        capture_sizes(0)
