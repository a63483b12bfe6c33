"""Row copies: rows of the host pool into a pool of the device, as lists on the device say."""

from __future__ import annotations

import torch

from sidestream.ops.operator import operator
from sidestream.ops.row_copy import torch_impl

__all__ = ["copy_rows"]

copy_rows = operator(
    "row_copy.copy_rows",
    reads=("host", "to", "source", "counts"),
    writes=("pool",),
    rows={"pool": "to", "host": "source"},
)(torch_impl.copy_rows)


@copy_rows.register("cuda")
def _copy_rows(
    pool: torch.Tensor,
    host: torch.Tensor,
    *,
    to: torch.Tensor,
    source: torch.Tensor,
    counts: torch.Tensor,
    spare: tuple[int, int],
) -> None:
    if pool.is_cuda:
        from sidestream.ops.row_copy import triton_copy

        triton_copy.copy_rows(pool, host, to=to, source=source, counts=counts, spare=spare)
        return
    torch_impl.copy_rows(pool, host, to=to, source=source, counts=counts, spare=spare)
