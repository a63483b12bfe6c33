"""Sequences on shuffled pages, for tests of operators that read paged pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sidestream.core.segment import Segment


@dataclass(frozen=True)
class Paged:
    """A step: segment r brings ``spans[r] = (start, length)``; unused block-table entries name the scratch block 0."""

    block_size: int
    num_blocks: int
    segments: tuple[Segment, ...]
    block_table: torch.Tensor
    positions: torch.Tensor
    token_rows: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    def rows(self, sequence: int, positions: torch.Tensor) -> torch.Tensor:
        """Pool rows of token positions."""
        return self.block_table[sequence, positions // self.block_size] * self.block_size + positions % self.block_size

    def entry_rows(self, sequence: int, entries: torch.Tensor, kpool: int) -> torch.Tensor:
        """Rows of the flat index keys."""
        per_block = self.block_size // kpool
        return self.block_table[sequence, entries // per_block] * per_block + entries % per_block

    def poisoned_pool(self, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[num_blocks * block_size, width]: random where a sequence has rows, NaN in every other row."""
        pool = torch.full((self.num_blocks * self.block_size, width), torch.nan, dtype=dtype)
        for segment in self.segments:
            where = self.rows(segment.sequence_row, torch.arange(segment.end_position))
            pool[where] = torch.randn(segment.end_position, width).to(dtype)
        return pool

    def poisoned_keys(self, dim: int, kpool: int) -> torch.Tensor:
        """[num_blocks, block_size // kpool, dim]: random complete entries, NaN in every other."""
        keys = torch.full((self.num_blocks * (self.block_size // kpool), dim), torch.nan)
        for segment in self.segments:
            count = segment.end_position // kpool
            keys[self.entry_rows(segment.sequence_row, torch.arange(count), kpool)] = torch.randn(count, dim)
        return keys.view(self.num_blocks, -1, dim)


def make_paged(spans: Sequence[tuple[int, int]], *, block_size: int, spare_blocks: int = 3) -> Paged:
    """Lay out sequences on pages in random order, from torch's global generator."""
    needed = [-(-(start + length) // block_size) for start, length in spans]
    num_blocks = 1 + sum(needed) + spare_blocks
    pages = torch.randperm(num_blocks - 1) + 1
    table = torch.zeros(len(spans), max(needed), dtype=torch.int64)
    used = 0
    for row, count in enumerate(needed):
        table[row, :count] = pages[used : used + count]
        used += count
    segments, token = [], 0
    for row, (start, length) in enumerate(spans):
        segments.append(Segment(token, length, row, start))
        token += length
    return Paged(
        block_size=block_size,
        num_blocks=num_blocks,
        segments=tuple(segments),
        block_table=table,
        positions=torch.cat([torch.arange(start, start + length) for start, length in spans]),
        token_rows=torch.cat([torch.full((length,), row) for row, (_, length) in enumerate(spans)]),
    )


@dataclass(frozen=True)
class PagedDecode:
    """A uniform decode: row r sees ``context_lens[r]`` tokens of a sequence of its own; 0 is a padding row."""

    paged: Paged
    context_lens: torch.Tensor
    block_table: torch.Tensor


def make_paged_decode(lengths: Sequence[int], *, block_size: int, spare_columns: int = 0) -> PagedDecode:
    """Lay out contexts on pages in random order; padding rows and unused entries name the scratch block 0."""
    paged = make_paged([(length - 1, 1) for length in lengths if length], block_size=block_size)
    table = torch.zeros(len(lengths), paged.block_table.shape[1] + spare_columns, dtype=torch.int64)
    true = [row for row, length in enumerate(lengths) if length]
    table[true, : paged.block_table.shape[1]] = paged.block_table
    return PagedDecode(paged, torch.tensor(lengths), table)
