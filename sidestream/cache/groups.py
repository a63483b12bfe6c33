"""What the caches of a model consist of, as data: kinds of memory, their layers, and bytes a block or a slot.

Memory that grows with a sequence (KV rows, index keys) is counted in blocks of one logical block table. Memory of
constant size a sequence (the state of linear attention, the unfinished index pool) is counted in slots, with a pool of
its own: it never makes a KV block larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod

import torch

from sidestream.config.model import AttentionKind, IndexerKind, ModelConfig
from sidestream.errors import ConfigError


class CacheKind(StrEnum):
    """Kinds of cache memory; the values are the field names of ``LayerCache``."""

    KV = "kv"
    INDEX_KEYS = "index_keys"
    INDEX_TAIL = "index_tail"
    CONV = "conv"
    RECURRENT = "recurrent"


class Placement(StrEnum):
    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Rows that grow with the sequence: each block of each layer holds ``rows_per_block`` rows of ``row_elems``."""

    kind: CacheKind
    layers: tuple[int, ...]
    rows_per_block: int
    row_elems: int
    dtype: torch.dtype
    placement: Placement = Placement.DEVICE

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes, over all layers of the group."""
        return len(self.layers) * self.rows_per_block * self.row_elems * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateGroup:
    """State of constant size: each slot of each layer holds ``rows_per_slot`` entries of ``row_shape``.

    ``rows_per_slot`` is the length of a ring (tail, conv) or the number of versions (recurrent).
    """

    kind: CacheKind
    layers: tuple[int, ...]
    rows_per_slot: int
    row_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one slot takes, over all layers of the group."""
        return len(self.layers) * self.rows_per_slot * prod(self.row_shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """All cache memory of a model."""

    block_size: int
    blocks: tuple[CacheGroup, ...]
    slots: tuple[StateGroup, ...]

    @property
    def bytes_per_block(self) -> int:
        return sum(group.bytes_per_block for group in self.blocks)

    @property
    def kv(self) -> CacheGroup:
        """The group of KV rows; there must be one."""
        return next(group for group in self.blocks if group.kind is CacheKind.KV)

    @property
    def bytes_per_slot(self) -> int:
        return sum(group.bytes_per_slot for group in self.slots)

    def bytes_by_kind(self, num_blocks: int, num_slots: int, *, kv_places: int | None = None) -> dict[str, int]:
        """Bytes of pools of that many blocks and slots, by kind; ``kv_places``: blocks whose KV rows are on the device,
        None for all."""
        places = num_blocks if kv_places is None else kv_places
        sizes = {
            f"{group.kind} cache": (places if group.kind is CacheKind.KV else num_blocks) * group.bytes_per_block
            for group in self.blocks
        }
        return sizes | {f"{group.kind} cache": num_slots * group.bytes_per_slot for group in self.slots}

    def bytes_total(self, num_blocks: int, num_slots: int) -> int:
        """Bytes of pools of that many blocks and slots, scratch included."""
        return num_blocks * self.bytes_per_block + num_slots * self.bytes_per_slot


def plan_cache_groups(
    config: ModelConfig,
    *,
    block_size: int,
    row_elems: int,
    row_dtype: torch.dtype,
    model_dtype: torch.dtype,
    rollback: int = 0,
) -> CacheGroups:
    """Groups that a model needs.

    Args:
        row_elems, row_dtype: of one KV row, as its byte layout says.
        model_dtype: of index keys, raw index tail and convolution inputs; recurrent state is always fp32.
        rollback: tokens that a sequence can take back. A ring keeps the ``window - 1`` tokens before the next one and
            that many more; recurrent state keeps that many versions beside the newest.
    Raises:
        ConfigError: ``block_size`` is not a multiple of the index pool, so a block would end inside a pool.
    """
    assert rollback >= 0, f"rollback {rollback}"
    blocks: list[CacheGroup] = []
    slots: list[StateGroup] = []
    mla_layers = config.layers_of(AttentionKind.SPARSE_MLA, AttentionKind.DENSE_MLA)
    if mla_layers:
        blocks.append(CacheGroup(CacheKind.KV, mla_layers, block_size, row_elems, row_dtype))
    leaders = tuple(i for i, layer in enumerate(config.layers) if layer.indexer is IndexerKind.FULL)
    if leaders:
        indexer = config.indexer
        assert indexer is not None, f"layers {leaders} run an indexer that the config does not describe"
        if block_size % indexer.kpool:
            raise ConfigError(
                f"block_size {block_size} is not a multiple of index_kpool {indexer.kpool} (from the checkpoint's "
                "config): a block would end inside an index pool; choose another block_size"
            )
        entries = block_size // indexer.kpool
        blocks.append(CacheGroup(CacheKind.INDEX_KEYS, leaders, entries, indexer.head_dim, model_dtype))
        if indexer.kpool > 1:
            ring = indexer.kpool - 1 + rollback
            slots.append(StateGroup(CacheKind.INDEX_TAIL, leaders, ring, (2 * indexer.head_dim,), model_dtype))
    kda_layers = config.layers_of(AttentionKind.KDA)
    if kda_layers:
        kda = config.kda
        assert kda is not None, f"layers {kda_layers} are KDA, which the config does not describe"
        ring = kda.conv_size - 1 + rollback
        slots.append(StateGroup(CacheKind.CONV, kda_layers, ring, (3 * kda.num_heads * kda.head_dim,), model_dtype))
        state = (kda.num_heads, kda.head_dim, kda.head_dim)
        slots.append(StateGroup(CacheKind.RECURRENT, kda_layers, 1 + rollback, state, torch.float32))
    return CacheGroups(block_size, tuple(blocks), tuple(slots))
