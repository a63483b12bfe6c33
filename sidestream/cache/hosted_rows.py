"""Memory of KV rows that may leave the device: places and hot slots there, the host pool, and how much of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sidestream.cache.groups import CacheGroups, CacheKind
from sidestream.cache.host_pool import HostPool
from sidestream.cache.kv_arena import KVArena

HOT_ROWS = "hot rows"
STAGED_ROWS = "staged rows"
HOT_TABLES = "tables of hot slots"
"""Their names in the memory ledger."""


@dataclass(frozen=True, slots=True)
class HostedSizes:
    """How many of everything, beside the places of blocks.

    Attributes:
        seats: sequences with hot slots, scratch included.
        slots: hot slots of each.
        host_blocks: of the host pool.
        staged: places for host blocks that the prefills of one step read.
        max_blocks: of the longest sequence.
        groups: of layers that share a selection; each has tables of its own.
    """

    seats: int
    slots: int
    host_blocks: int
    staged: int
    max_blocks: int
    groups: int

    @property
    def hot_rows(self) -> int:
        return self.seats * self.slots

    @property
    def context_limit(self) -> int | None:
        """Full blocks that a step's prefills may have behind them, lest more of them be on the host than can be staged;
        None if that cannot happen."""
        most = min(self.host_blocks, (self.seats - 1) * self.max_blocks)
        return self.staged if self.staged < most else None

    def table_bytes(self, block_size: int) -> int:
        """Of one group: where each position is, four numbers a slot, and lists of rows to copy."""
        positions = self.max_blocks * block_size + 1
        return self.seats * (4 * positions + 16 * self.slots + 16) + (self.seats - 1) * (16 * self.slots + 4)

    def bytes_by_kind(self, groups: CacheGroups) -> dict[str, int]:
        """Bytes on the device of what is only there because blocks may leave it; index keys stay there."""
        kv, rows = groups.kv, groups.block_size
        a_block = kv.bytes_per_block
        keys = sum(group.bytes_per_block for group in groups.blocks if group.kind is not CacheKind.KV)
        return {
            HOT_ROWS: -(-self.hot_rows // rows) * a_block,
            STAGED_ROWS: self.staged * a_block // len(kv.layers),
            HOT_TABLES: self.groups * self.table_bytes(rows),
            f"{CacheKind.INDEX_KEYS} of host blocks": self.host_blocks * keys,
        }


class HostedRows:
    """The memory itself.

    Args:
        places: blocks on the device, scratch included.
    Raises:
        CapacityError: the host has not so much memory.
    """

    def __init__(self, groups: CacheGroups, sizes: HostedSizes, places: int, *, device: torch.device) -> None:
        self.sizes, self.places = sizes, places
        self._groups = groups
        self.host = HostPool(groups.kv, sizes.host_blocks, device=device)
        self.arena = KVArena(groups.kv, places=places, hot_rows=sizes.hot_rows, staged=sizes.staged, device=device)

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes on the device, by their names in the ledger."""
        beside = self.sizes.bytes_by_kind(self._groups)
        hot, staged = beside[HOT_ROWS], beside[STAGED_ROWS]
        return {
            f"{CacheKind.KV} cache": self.arena.nbytes - hot - staged,
            HOT_ROWS: hot,
            STAGED_ROWS: staged,
        }
