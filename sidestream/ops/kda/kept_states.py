"""States that a chunk of a prompt leaves in other slots on its way: where it is cut for them, and where they go."""

from __future__ import annotations

from collections.abc import Sequence

from sidestream.core.batch import Split

Kept = Sequence[Sequence[Split]]
"""One entry a sequence; none at all stands for a step in which nothing is kept."""


def runs_of(start: int, length: int, splits: Sequence[Split]) -> list[tuple[int, int, Split | None]]:
    """Parts of a chunk between the states it leaves: (first token within the chunk, tokens, what its end leaves).

    Args:
        splits: positions above ``start`` and up to the chunk's end, in order.
    """
    ends = [split.position - start for split in splits]
    assert all(a < b for a, b in zip([0, *ends], [*ends, length + 1], strict=True)), (
        f"states {list(splits)} are not in order within the chunk of {length} tokens at {start}"
    )
    runs: list[tuple[int, int, Split | None]] = []
    first = 0
    for end, split in zip(ends, splits, strict=True):
        runs.append((first, end - first, split))
        first = end
    return runs if first == length else [*runs, (first, length - first, None)]


def by_sequence(kept: Kept, sequences: int) -> Kept:
    """One entry for each sequence."""
    assert len(kept) in (0, sequences), f"states of {len(kept)} sequences are kept, there are {sequences}"
    return kept or ((),) * sequences


def row_of(split: Split, versions: int) -> int:
    """Of the states [slots * versions, ..], by the rule of ``torch_impl.recurrent``."""
    return split.slot * versions + split.position % versions
