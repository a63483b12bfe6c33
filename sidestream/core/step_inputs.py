"""Tensors and host integers that every layer of one step shares: built once, immutable while the step runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sidestream.core.batch import Split
from sidestream.core.ring import RingPlan
from sidestream.core.segment import Segment


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Which index pools of ``index_kpool`` tokens this step completes.

    Attributes:
        ring: windows of ``kpool`` tokens over the raw tail ring.
        ends: [C] token rows that complete a pool.
        entries: [C] rows of the flat index keys [num_blocks * (block_size // kpool), D] they are written to.
    """

    ring: RingPlan
    ends: torch.Tensor
    entries: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """T true tokens in flat order, padded to Tp rows; R sequences, decodes first.

    Padding rows carry token 0 at position 0 of the scratch block, and belong to block-table row R, which is all
    scratch.

    A step is laid out in one of two forms. In a **uniform** one every row, padding included, is the one token of a
    sequence of its own, and shapes follow from Tp alone, so that a graph can hold all of it: the block table is
    [Tp, widest], padding rows have state slot 0 and a ``context_lens`` of 0, and host integers that a graph would bake
    (``segments``, ``host_slots``) are left out. Otherwise host integers describe the sequences.

    Attributes:
        capturable: laid out for a device that captures graphs, so nothing may depend on the mode that the step runs in.
        token_ids, positions, token_rows, slot_mapping: [Tp] int64; ``slot_mapping`` is the KV row to write.
        key_mapping: [Tp] int64, the same by blocks instead of places, for index keys at token granularity; those never
            leave the device.
        sources: [Tp] int64 rows of the last step's sampled tokens that stand in for token ids the host does not know
            yet, or -1; None where it knows all.
        block_table: [R + 1, B] int64; [Tp, B] in a uniform step.
        kv_table: the same shape: where the KV rows of those blocks are: a place on the device, or -1 - a place in the
            host pool. The block table itself where nothing ever leaves the device.
        seats: [R] or [Tp] int64, whose hot slots each sequence has; 0 for padding and for prefills. None without a
            host pool.
        context_lens: [Tp] int64 in a uniform step, the tokens that a row may see, its own included; else None.
        segments: one a sequence, in flat order; the first ``num_decode`` are continuations of one length.
        slots, starts: [R] or [Tp] int64, each sequence's state slot and its first position in this step.
        conv: ring plan of the short convolution, None without KDA layers.
        kept: states of linear attention that each sequence leaves within its chunk; empty where none leaves any. The
            rings of the short convolution that belong to them are in ``conv``.
        pools: None without an indexer or at token granularity. In a uniform step every row completes a pool, those
            that do not in truth write it to the scratch block.
    """

    num_tokens: int
    num_padded_tokens: int
    num_decode: int
    uniform: bool
    capturable: bool
    token_ids: torch.Tensor
    sources: torch.Tensor | None
    positions: torch.Tensor
    token_rows: torch.Tensor
    slot_mapping: torch.Tensor
    key_mapping: torch.Tensor
    block_table: torch.Tensor
    kv_table: torch.Tensor
    seats: torch.Tensor | None
    context_lens: torch.Tensor | None
    block_size: int
    segments: tuple[Segment, ...]
    slots: torch.Tensor
    starts: torch.Tensor
    host_slots: tuple[int, ...]
    conv: RingPlan | None
    pools: PoolPlan | None
    kept: tuple[tuple[Split, ...], ...] = ()

    @property
    def segment_rows(self) -> int:
        """Rows that work covers which a graph segment may hold: Tp where graphs are captured, else T."""
        return self.num_padded_tokens if self.capturable else self.num_tokens

    @property
    def mixer_rows(self) -> int:
        """Rows that KDA and attention cover: Tp in a uniform step, else T."""
        return self.num_padded_tokens if self.uniform else self.num_tokens

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decode * self.decode_length

    @property
    def decode_length(self) -> int:
        """Tokens that each decode brings: 1, or 1 + n when speculated tokens are verified."""
        return self.segments[0].length if self.num_decode and not self.uniform else min(self.num_decode, 1)

    def static_tensors(self) -> dict[str, torch.Tensor]:
        """What captured graphs of this form and size read, by name: at one address in every step."""
        tensors = {"token_ids": self.token_ids, "positions": self.positions}
        if not self.uniform:
            return tensors
        assert self.context_lens is not None
        for name in ("token_rows", "slot_mapping", "block_table", "context_lens", "slots", "starts"):
            tensors[name] = getattr(self, name)
        if self.seats is not None:
            tensors |= {"kv_table": self.kv_table, "seats": self.seats, "key_mapping": self.key_mapping}
        rings = {"conv": self.conv, "pools": self.pools.ring if self.pools is not None else None}
        for name, ring in rings.items():
            if ring is not None:
                tensors |= {f"{name}.{i}": tensor for i, tensor in enumerate(ring.tensors)}
        if self.pools is not None:
            tensors |= {"pools.ends": self.pools.ends, "pools.entries": self.pools.entries}
        return tensors
