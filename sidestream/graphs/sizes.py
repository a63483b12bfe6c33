"""Which step sizes are captured, and which of them a batch is padded to. Pure functions of counts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_FINE = 8
"""Step between neighbouring sizes from here up to four times as many rows."""


def capture_sizes(limit: int) -> tuple[int, ...]:
    """Sizes from 1 to ``limit``, ascending: 1, 2, 4, then steps of 8, and from 64 on four steps a doubling.

    Above 8 a batch is padded by less than a quarter of its rows or by less than 8. ``limit`` itself is always a size,
    so every batch up to it has one.

    Args:
        limit: the most rows that a step can have (sequences of a decode, tokens of a chunk).
    """
    assert limit >= 1, f"no step has {limit} rows"
    sizes = [size for size in (1, 2, 4) if size < limit]
    size = _FINE
    while size < limit:
        sizes.append(size)
        size += max(_FINE, 1 << (size.bit_length() - 3))
    return (*sizes, limit)


def padded_size(rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending ``sizes`` that holds ``rows``; None if there is none."""
    place = bisect_left(sizes, rows)
    return sizes[place] if place < len(sizes) else None
