"""The cache memory itself: one tensor a layer and kind."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch

from sidestream.cache.groups import CacheGroup, CacheGroups, CacheKind, Placement, StateGroup
from sidestream.cache.hosted_rows import HostedRows
from sidestream.core.batch import SCRATCH_BLOCK, SCRATCH_SLOT, SlotCopy
from sidestream.core.layer_cache import LayerCache
from sidestream.ops.slot_copy import copy_slots

POISON_BYTE = 0x7F
SNAPSHOTS = "snapshots of state"
"""Their name in the memory ledger."""


class CachePools:
    """Allocates the groups' memory once; whoever runs a step reads and writes it in place.

    Args:
        num_blocks: that sequences can own, scratch included.
        hosted: memory of KV rows if blocks may leave the device: fewer places than there are blocks.

    Slots ``num_slots`` and more are those of snapshots: they hold what a slot held at a block boundary, and only
    ``copy_slots`` touches them.

    The memory is not initialised, except for the scratch block and slot, which are zero: nothing reads a row before
    it was written, and tests make sure by ``poison``.

    Attributes:
        kv: layer -> [num_blocks * block_size, row_elems], row = block * block_size + offset. With ``hosted`` the
            layer's view of the arena, and ``block`` is a place.
        index_keys: layer -> [num_blocks, block_size // kpool, D].
        index_tail: layer -> [slots * ring, 2 * D], row = slot * ring + position % ring.
        conv: layer -> [slots * ring, 3 * H * D].
        recurrent: layer -> [slots, versions, H, K, V] fp32.
    """

    def __init__(
        self,
        groups: CacheGroups,
        num_blocks: int,
        num_slots: int,
        *,
        device: torch.device | str,
        num_snapshots: int = 0,
        hosted: HostedRows | None = None,
    ) -> None:
        self.groups = groups
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.num_snapshots = num_snapshots
        self.device = torch.device(device)
        memory: dict[CacheKind, dict[int, torch.Tensor]] = {kind: {} for kind in CacheKind}
        self.hosted = hosted
        for group in groups.blocks:
            for layer in group.layers:
                own = group.kind is CacheKind.KV and hosted is not None
                memory[group.kind][layer] = self._hosted(layer) if own else self._blocks(group)
        self._states = [self._slots(state) for state in groups.slots]
        for state, pool in zip(groups.slots, self._states, strict=True):
            for layer, own in zip(state.layers, pool, strict=True):
                memory[state.kind][layer] = own if state.kind is CacheKind.RECURRENT else own.flatten(0, 1)
        self.kv = memory[CacheKind.KV]
        self.index_keys = memory[CacheKind.INDEX_KEYS]
        self.index_tail = memory[CacheKind.INDEX_TAIL]
        self.conv = memory[CacheKind.CONV]
        self.recurrent = memory[CacheKind.RECURRENT]

    def layer(self, index: int) -> LayerCache:
        """What decoder layer ``index`` keeps."""
        return LayerCache(
            kv=self.kv.get(index),
            index_keys=self.index_keys.get(index),
            index_tail=self.index_tail.get(index),
            conv=self.conv.get(index),
            recurrent=self.recurrent.get(index),
        )

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of every layer and kind."""
        kinds = (self.index_keys, self.index_tail, self.conv, self.recurrent)
        rows = [self.hosted.arena.memory] if self.hosted is not None else list(self.kv.values())
        return rows + [tensor for kind in kinds for tensor in kind.values()]

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of the tensors, by kind, as ``CacheGroups.bytes_by_kind`` foresees them."""
        kinds = {kind: getattr(self, kind) for kind in CacheKind}
        sizes = {
            f"{kind} cache": sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
            for kind, tensors in kinds.items()
            if tensors
        }
        if self.hosted is not None:
            sizes |= self.hosted.bytes_by_kind()
        if not self.num_snapshots:
            return sizes
        share = Fraction(self.num_slots, self.num_slots + self.num_snapshots)
        own = {f"{group.kind} cache": int(sizes[f"{group.kind} cache"] * share) for group in self.groups.slots}
        return sizes | own | {SNAPSHOTS: sum(sizes.values()) - sum((sizes | own).values())}

    def bytes_total(self) -> int:
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors())

    @torch.inference_mode()
    def copy_slots(self, copies: Sequence[SlotCopy]) -> None:
        """Copy all state of a slot to another, pair after pair, on the current stream."""
        if copies and self._states:
            slots = [state.transpose(0, 1) for state in self._states]
            copy_slots(*slots, to=[copy.target for copy in copies], taken=[copy.source for copy in copies])

    def poison(self) -> None:
        """For tests: fill all memory, scratch too, with NaN, or with 0x7f bytes where the dtype is not a float."""
        for tensor in self.tensors():
            if tensor.is_floating_point() and tensor.itemsize > 1:
                tensor.fill_(float("nan"))
            else:
                tensor.view(torch.uint8).fill_(POISON_BYTE)

    def _blocks(self, group: CacheGroup) -> torch.Tensor:
        pool = self._empty((self.num_blocks, group.rows_per_block, group.row_elems), group.dtype, group.placement)
        pool[SCRATCH_BLOCK].zero_()
        return pool.view(-1, group.row_elems) if group.kind is CacheKind.KV else pool

    def _hosted(self, layer: int) -> torch.Tensor:
        assert self.hosted is not None
        rows = self.hosted.arena.layer(layer)
        rows[SCRATCH_BLOCK * self.groups.block_size :][: self.groups.block_size].zero_()
        return rows

    def _slots(self, group: StateGroup) -> torch.Tensor:
        """[layers, slots, ...]: one piece, so that one copy moves a slot of all layers."""
        slots = self.num_slots + self.num_snapshots
        shape = (len(group.layers), slots, group.rows_per_slot, *group.row_shape)
        pool = self._empty(shape, group.dtype, Placement.DEVICE)
        pool[:, SCRATCH_SLOT].zero_()
        return pool

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype, placement: Placement) -> torch.Tensor:
        if placement is Placement.HOST:
            return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")
        return torch.empty(shape, dtype=dtype, device=self.device)
