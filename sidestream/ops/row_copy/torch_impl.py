"""Row copies in torch; no shape depends on the counts."""

from __future__ import annotations

import torch


def copy_rows(
    pool: torch.Tensor,
    host: torch.Tensor,
    *,
    to: torch.Tensor,
    source: torch.Tensor,
    counts: torch.Tensor,
    spare: tuple[int, int],
) -> None:
    """Copy ``host[source[r, i]]`` to ``pool[to[r, i]]`` for every i below ``counts[r]``, byte for byte.

    Args:
        pool: [rows, E] of the device, rows of unit stride.
        host: [host_rows, E] of the same type; pinned memory that the device can read, if it is a GPU.
        to, source: [R, M] int64; what lies behind the counts is not used.
        counts: [R] int32.
        spare: rows of ``pool`` and ``host`` that nobody else uses meanwhile: entries behind the counts may touch them.
    No row may be written twice.
    """
    valid = torch.arange(to.shape[1], device=to.device) < counts[:, None]
    rows = host[torch.where(valid, source, spare[1])]
    target = torch.where(valid, to, spare[0])
    pool[target] = torch.where(valid[:, :, None], rows, pool[target])
