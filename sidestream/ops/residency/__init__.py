"""Residency: which selected KV rows are on the device, and where those go that are not."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sidestream.ops.operator import operator
from sidestream.ops.residency import torch_impl
from sidestream.ops.residency.torch_impl import clear_seats, invalidate, new_state

__all__ = ["clear_seats", "invalidate", "new_state", "resolve"]

resolve = operator(
    "residency.resolve",
    reads=("logical", "block_table", "slot_of", "slots", "seats", "positions", "table_rows", "totals"),
    writes=("slot_of", "slots", "out", "counts", "host_rows", "hot_rows", "misses", "totals"),
    rows={"block_table": "table_rows", "slot_of": "seats", "slots": "seats", "totals": "seats"},
)(torch_impl.resolve)


@resolve.register("cuda")
def _resolve(
    logical: torch.Tensor,
    block_table: torch.Tensor,
    slot_of: torch.Tensor,
    slots: torch.Tensor,
    *,
    seats: torch.Tensor,
    positions: torch.Tensor,
    table_rows: torch.Tensor,
    block_size: int,
    hot_base: int,
    out: torch.Tensor,
    counts: torch.Tensor,
    host_rows: torch.Tensor,
    hot_rows: torch.Tensor,
    misses: torch.Tensor,
    totals: torch.Tensor,
) -> None:
    run: Callable[..., None] = torch_impl.resolve
    if logical.is_cuda:
        from sidestream.ops.residency import triton_resolve

        run = triton_resolve.resolve
    run(
        logical,
        block_table,
        slot_of,
        slots,
        seats=seats,
        positions=positions,
        table_rows=table_rows,
        block_size=block_size,
        hot_base=hot_base,
        out=out,
        counts=counts,
        host_rows=host_rows,
        hot_rows=hot_rows,
        misses=misses,
        totals=totals,
    )
