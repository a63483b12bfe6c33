"""Logical token positions to physical rows of a paged pool."""

from __future__ import annotations

import numpy as np
import torch

NUMPY_ENTRIES = 1 << 14
"""Entries up to which numpy, whose calls cost a third of torch's, is faster on a CPU."""


def logical_to_physical(
    logical: torch.Tensor,
    block_table: torch.Tensor,
    *,
    token_rows: torch.Tensor,
    block_size: int,
    out: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Translate selected positions, and count them.

    Args:
        logical: [T, W] int32 token positions of each token's own sequence, a valid prefix, then -1 (no other
            negative number). A padding token has none.
        block_table: [R, B] int64 or int32.
        token_rows: [T] int64, the block-table row of each token; any row for a padding token.
        block_size: tokens a block.
        out: [T, W] int64 or int32, all written: ``block * block_size + offset``, -1 where ``logical`` is.
        counts: [T] int32, written: valid entries of the row.
    All tensors may have any strides.
    """
    if logical.device.type == "cpu" and logical.numel() <= NUMPY_ENTRIES:
        _map_numpy(logical, block_table, token_rows, block_size, out, counts)
        return
    # -1 divides down to block -1, which reads some page of the table harmlessly and is replaced below.
    position = logical.long()
    # A shift for the usual sizes: integer division is thirty times slower on a CPU.
    power_of_two = block_size & (block_size - 1) == 0
    block = position >> (block_size.bit_length() - 1) if power_of_two else position // block_size
    page = block_table[token_rows[:, None], block]
    valid = logical >= 0
    row = torch.add(position, page - block, alpha=block_size)
    out.copy_(torch.where(valid, row, position))
    torch.sum(valid, dim=1, dtype=torch.int32, out=counts)


def _map_numpy(
    logical: torch.Tensor,
    block_table: torch.Tensor,
    token_rows: torch.Tensor,
    block_size: int,
    out: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    position = logical.numpy()
    block = position // block_size
    row = np.subtract(block_table.numpy()[token_rows.numpy()[:, None], block], block, dtype=np.int64)
    row *= block_size
    row += position
    valid = position >= 0
    np.copyto(out.numpy(), np.where(valid, row, -1), casting="same_kind")
    np.add.reduce(valid, axis=1, dtype=np.int32, out=counts.numpy())
