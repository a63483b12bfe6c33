"""Groups of decode segments that run as one padded batch, and how much memory such a batch may take.

Operators that treat decodes as batches and prefills one by one (the indexer, dense MLA) plan their work here from
host integers, so that nothing is read back from a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sidestream.core.segment import Segment

SCRATCH_BYTES = 4 << 20
"""Bound on the temporaries of one inner step on a CPU. Much larger ones are slower, since they leave the caches
between two passes."""
DEVICE_SCRATCH_BYTES = 256 << 20
"""The same elsewhere: launches are the cost there, so usual sizes shall need one inner step."""

_WASTE_BYTES = 512 << 10
"""Padding that costs about as much as the calls of one more group."""


def scratch_of(tensor: torch.Tensor, scratch_bytes: int | None) -> int:
    """The bound that the caller gave, or the one of the tensor's device."""
    if scratch_bytes is not None:
        return scratch_bytes
    return SCRATCH_BYTES if tensor.is_cpu else DEVICE_SCRATCH_BYTES


def decode_length(segments: Sequence[Segment], num_decode: int) -> int:
    """Tokens of a decode segment, 0 without decodes. Checks that the decodes form one dense batch: equal lengths,
    flat token rows from 0 on, consecutive rows of the block table."""
    if not num_decode:
        return 0
    length, first_row = segments[0].length, segments[0].sequence_row
    for i, segment in enumerate(segments[:num_decode]):
        expected = (i * length, length, first_row + i)
        found = (segment.token_start, segment.length, segment.sequence_row)
        assert found == expected, f"decode segment {i} is (token_start, length, row) {found}, expected {expected}"
    return length


def group_decodes(entries: Sequence[int], *, entry_bytes: int) -> list[tuple[int, int, int]]:
    """Cut decodes into runs ``(first, last, longest)`` that are padded to their longest member.

    One long context among short ones would make all of them pay for it, so a run ends where padding would cost more
    than a quarter of the useful work and more than the overhead of another run.

    Args:
        entries: cache entries that each decode reads, in batch order.
        entry_bytes: temporaries an entry needs.
    """
    groups: list[tuple[int, int, int]] = []
    first, longest, total = 0, 0, 0
    for i, size in enumerate(entries):
        padded = max(longest, size)
        waste = padded * (i + 1 - first) - (total + size)
        if i > first and waste * entry_bytes > max(_WASTE_BYTES, (total + size) * entry_bytes // 4):
            groups.append((first, i, longest))
            first, padded, total = i, size, 0
        longest, total = padded, total + size
    if entries:
        groups.append((first, len(entries), longest))
    return groups
