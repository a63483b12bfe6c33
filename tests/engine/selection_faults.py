"""Makes one sparse layer of an engine read the wrong rows, as a broken indexer, resolver or page table would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from sidestream.attention import latent
from sidestream.attention.latent import PagedLatentAttention
from sidestream.core.forward_context import get_forward_context
from training.selection import Fault, Selection, corrupt


@contextmanager
def faulty_selection(layer: int, fault: Fault, *, kpool: int, topk: int) -> Iterator[None]:
    """While open, ``layer`` alone attends to a selection with ``fault``; the other layers of its group do not.

    For steps of one whole sequence: its pools, the tail behind them, and the rows they live in are computed anew.
    """
    attend, sparse_mla = PagedLatentAttention.attend, latent.sparse_mla
    here = [-1]

    def attend_here(self: PagedLatentAttention, at: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        here[0] = at
        return attend(self, at, *args, **kwargs)

    def attend_wrongly(query: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor, **kwargs: Any) -> Any:
        if here[0] != layer:
            return sparse_mla(query, pool, rows, **kwargs)
        inputs = get_forward_context().inputs
        attention = get_forward_context().attention
        assert isinstance(attention, PagedLatentAttention)
        logical = attention._group_of[layer].logical_topk_indices.long()
        wrong = corrupted(logical, inputs.positions[: logical.shape[0]], fault, kpool=kpool, topk=topk)
        found = inputs.block_table[0][wrong.clamp(min=0) // inputs.block_size] * inputs.block_size
        found += wrong.clamp(min=0) % inputs.block_size
        kwargs["counts"] = (wrong >= 0).sum(-1, dtype=torch.int32)
        return sparse_mla(query, pool, found.masked_fill(wrong < 0, -1), **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedLatentAttention, "attend", attend_here)
        patch.setattr(latent, "sparse_mla", attend_wrongly)
        yield


def corrupted(logical: torch.Tensor, positions: torch.Tensor, fault: Fault, *, kpool: int, topk: int) -> torch.Tensor:
    """Token positions [T, W], ascending, -1 behind, of the selection ``logical`` [T, W] with a fault."""
    pools = logical[:, :topk:kpool] // kpool
    chosen = ((positions + 1) // kpool).clamp(max=topk // kpool)
    pools = pools.masked_fill(torch.arange(pools.shape[1]) >= chosen[:, None], -1)
    rows = corrupt(Selection(pools[None], positions, kpool), fault).rows()[0]
    last = torch.iinfo(rows.dtype).max
    ordered = rows.masked_fill(rows < 0, last).sort(-1).values
    return ordered.masked_fill(ordered == last, -1)
