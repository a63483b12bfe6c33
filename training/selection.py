"""Which cache rows a query of a sparse layer reads, and the faults that a broken engine could make there.

B rows, Q queries, T tokens, P complete pools, K selected pools, R = K * kpool + kpool - 1 row numbers (-1 = none).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Fault = Literal["random", "newest", "off_by_one", "late", "swapped_pages", "no_tail", "half_worst", "half_odd"]
FAULTS: tuple[Fault, ...] = (
    "random",
    "newest",
    "off_by_one",
    "late",
    "swapped_pages",
    "no_tail",
    "half_worst",
    "half_odd",
)
PAGE_POOLS = 4  # pools in a page of the fault `swapped_pages`


@dataclass(frozen=True)
class Selection:
    """Chosen pools, best first, [B, Q, K] (-1 = none), for queries at `positions` [Q]."""

    pools: Tensor
    positions: Tensor
    kpool: int
    tail: bool = True

    def rows(self) -> Tensor:
        """Token numbers [B, Q, R]: the pools' tokens, then the unfinished pool of the query."""
        offset = torch.arange(self.kpool, device=self.pools.device)
        tokens = (
            (self.pools.unsqueeze(-1) * self.kpool + offset).masked_fill(self.pools.unsqueeze(-1) < 0, -1).flatten(-2)
        )
        seen = (self.positions + 1).unsqueeze(-1)
        tail = seen - seen % self.kpool + offset[:-1]
        tail = tail.masked_fill(tail >= (seen if self.tail else 0), -1)
        return torch.cat([tokens, tail.expand(tokens.shape[0], -1, -1)], dim=-1)


def visible_pools(positions: Tensor, pools: int, kpool: int) -> Tensor:
    """Bool [Q, P]: the pool's last token is not after the query."""
    last = torch.arange(pools, device=positions.device) * kpool + kpool - 1
    return last <= positions.unsqueeze(-1)


def select(scores: Tensor, positions: Tensor, budget: int, kpool: int) -> Selection:
    """The best `budget` visible pools by score [B, Q, P]."""
    pools = scores.shape[-1]
    masked = scores.masked_fill(~visible_pools(positions, pools, kpool), float("-inf"))
    best, chosen = masked.topk(min(budget, pools), dim=-1)
    return Selection(chosen.masked_fill(best == float("-inf"), -1), positions, kpool)


def corrupt(selection: Selection, fault: Fault, seed: int | None = 0) -> Selection:
    """The same selection with a fault; a query keeps as many pools as it had, except where the fault is to lose some.

    Random pools come from `seed`, or from torch's own generator where it is None.
    """
    pools, kpool = selection.pools, selection.kpool
    count = ((selection.positions + 1) // kpool).view(1, -1, 1)
    none = pools < 0
    slot = torch.arange(pools.shape[-1], device=pools.device)
    if fault == "random":
        source = None if seed is None else torch.Generator(device=pools.device).manual_seed(seed)
        changed = (torch.rand(pools.shape, generator=source, device=pools.device) * count).long()
    elif fault == "newest":
        changed = (count - 1 - slot).clamp(min=0)
    elif fault == "off_by_one":
        changed = torch.where(pools + 1 < count, pools + 1, (pools - 1).clamp(min=0))
    elif fault == "late":
        changed = torch.cat([pools[:, :1], pools[:, :-1]], dim=1)
        none = changed < 0
    elif fault == "swapped_pages":
        swapped = pools ^ PAGE_POOLS
        changed = torch.where(swapped < count, swapped, pools)
    elif fault == "no_tail":
        return Selection(pools, selection.positions, kpool, tail=False)
    elif fault == "half_worst":
        changed, none = pools, none | (slot >= (pools.shape[-1] + 1) // 2)
    else:
        by_number = pools.masked_fill(none, torch.iinfo(pools.dtype).max).argsort(-1).argsort(-1)
        changed, none = pools, none | (by_number % 2 == 0)
    return Selection(changed.masked_fill(none, -1), selection.positions, kpool, selection.tail)


TRAINED: tuple[Fault, ...] = ("random", "newest", "off_by_one", "swapped_pages")
"""Faults of the sensitivity loss, in the order of their codes 1, 2, ..."""


def corrupt_by_code(selection: Selection, code: Tensor) -> Selection:
    """The fault whose number is in the scalar tensor `code` (0 = none), without a host read: a CUDA graph holds it."""
    variants = [selection.pools, *(corrupt(selection, fault, None).pools for fault in TRAINED)]
    pools = torch.stack(variants).index_select(0, code.view(1)).squeeze(0)
    return Selection(pools, selection.positions, selection.kpool, selection.tail)


def blind_mask(length: int, rows: int, code: Tensor, near: int = 32, share: float = 0.06) -> Tensor:
    """Bool [rows, 1, T, T], causal; where `code` is not 0, only near tokens and a random share of groups of four."""
    at = torch.arange(length, device=code.device)
    distance = at.unsqueeze(-1) - at
    kept = (
        torch.rand(rows, 1, 1, (length + 3) // 4, device=code.device)
        .lt(share)
        .repeat_interleave(4, dim=-1)[..., :length]
    )
    return (distance >= 0) & ((distance < near) | kept | (code == 0))
