"""Grouping of decodes: nothing lost, padding bounded, malformed batches noticed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sidestream.core.segment import Segment
from sidestream.ops.decode_groups import DEVICE_SCRATCH_BYTES, SCRATCH_BYTES, decode_length, group_decodes, scratch_of


@given(st.lists(st.integers(0, 100_000), max_size=40), st.integers(1, 4096))
def test_groups_cover_all_and_bound_the_waste(entries: list[int], entry_bytes: int) -> None:
    groups = group_decodes(entries, entry_bytes=entry_bytes)
    assert [i for first, last, _ in groups for i in range(first, last)] == list(range(len(entries)))
    for first, last, longest in groups:
        useful = sum(entries[first:last])
        assert longest == max(entries[first:last])
        waste = (last - first) * longest - useful
        assert waste * entry_bytes <= max(512 << 10, useful * entry_bytes / 4)


def test_equal_lengths_are_one_group() -> None:
    assert group_decodes([30_000] * 64, entry_bytes=4096) == [(0, 64, 30_000)]


def test_a_long_context_does_not_pad_short_ones() -> None:
    assert group_decodes([100, 100, 100_000, 90], entry_bytes=256) == [(0, 2, 100), (2, 3, 100_000), (3, 4, 90)]


@pytest.mark.parametrize(
    "second", [Segment(3, 2, 5, 9), Segment(2, 1, 5, 9), Segment(2, 2, 6, 9)], ids=["gap", "length", "row"]
)
def test_decodes_must_form_one_dense_batch(second: Segment) -> None:
    first = Segment(0, 2, 4, 7)
    assert decode_length([first, Segment(2, 2, 5, 9)], 2) == 2
    assert decode_length([first, second], 1) == 2  # only decodes are checked
    with pytest.raises(AssertionError, match="decode segment 1"):
        decode_length([first, second], 2)
    assert decode_length([], 0) == 0


def test_scratch_follows_the_device_unless_it_is_given() -> None:
    host, elsewhere = torch.zeros(1), torch.zeros(1, device="meta")
    assert scratch_of(host, None) == SCRATCH_BYTES
    assert scratch_of(elsewhere, None) == DEVICE_SCRATCH_BYTES > SCRATCH_BYTES
    assert scratch_of(host, 0) == scratch_of(elsewhere, 0) == 0
