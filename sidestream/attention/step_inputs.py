"""Builds a step's shared tensors from what the scheduler planned: all index arithmetic, once, on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch

from sidestream.core.batch import SCRATCH_BLOCK, SCRATCH_SLOT, Chunk, Split
from sidestream.core.ring import RingPlan, plan_ring
from sidestream.core.segment import Segment
from sidestream.core.step_inputs import PoolPlan, StepInputs
from sidestream.streams.upload import Array, Narrow, PackedUpload

ROW_BUCKET = 8
"""Token rows are padded to a multiple of this on a CPU, so that a row's GEMM bits depend less on its neighbours."""

WIDE_TABLE = 32_768
"""Elements from which on a uniform step's block table travels without the columns that no sequence has: 256 KB take
8 us, and a copy on the device 2."""

Place = Callable[[Sequence[Array | Narrow]], list[torch.Tensor]]


class KVPlaces(Protocol):
    """Where the KV rows of blocks are, if they may leave the device."""

    def places(self, blocks: Array) -> Array:
        """Places of blocks on the device, or -1 - those in the host pool."""
        ...

    def seats(self, chunks: Sequence[Chunk]) -> list[int]:
        """Whose hot slots each chunk has; 0 for prefills."""
        ...


def place_on_host(arrays: Sequence[Array | Narrow]) -> list[torch.Tensor]:
    """The arrays as CPU tensors, over the same memory where they are whole."""
    return [torch.from_numpy(array.whole() if isinstance(array, Narrow) else array) for array in arrays]


@dataclass(frozen=True, slots=True)
class StepInputsBuilder:
    """The few numbers that a step's layout depends on.

    Attributes:
        block_size: tokens a block.
        conv_size: taps of the short convolution; 0 without KDA layers.
        kpool: tokens an index pool; 1 at token granularity or without an indexer.
        rollback: tokens that a sequence may take back.
        max_blocks: of one sequence; width of a uniform step's block table.
        max_model_len: longest sequence; 0 is all that ``max_blocks`` hold.
        place: brings arrays to the device: ``place_on_host`` or ``PackedUpload.place``.
        capturable: graph segments may hold this device's steps, so their work covers padding rows too.
        kv_places: None where all KV rows are on the device for good, in the place of their block.
    """

    block_size: int
    conv_size: int
    kpool: int
    rollback: int
    max_blocks: int = 0
    max_model_len: int = 0
    place: Place = place_on_host
    capturable: bool = False
    kv_places: KVPlaces | None = None

    def upload_elements(self, *, max_seqs: int, max_tokens: int) -> int:
        """int64 elements that ``PackedUpload`` needs for any step of at most these counts, padding included."""
        windows = [window for window in (self.conv_size, self.kpool if self.kpool > 1 else 0) if window]
        sizes = [max_tokens] * 5 + [(max_seqs + 1) * max(self.max_blocks, 1)] + [max_tokens, max_seqs, max_seqs]
        for window in windows:
            sizes += [max_seqs * (window - 1), max_tokens * window, max_tokens, max_tokens]
        sizes += [max_tokens, max_tokens]
        if self.conv_size:  # rings of kept states, which stand behind blocks
            kept = min(max_tokens, max_tokens // self.block_size + max_seqs) * (self.conv_size - 1)
            sizes += [max_tokens + kept, max_tokens + kept, kept, kept]
        if self.kv_places is not None:
            sizes += [(max_seqs + 1) * max(self.max_blocks, 1), max_tokens, max_tokens]
        elif (max_seqs + 1) * self.max_blocks >= WIDE_TABLE:  # columns on their way beside the table itself
            sizes += [(max_seqs + 1) * self.max_blocks]
        return PackedUpload.elements([size + 1 for size in sizes])

    def build(
        self,
        chunks: Sequence[Chunk],
        token_ids: Sequence[int],
        *,
        rows: int | None = None,
        sources: Sequence[int] | None = None,
    ) -> StepInputs:
        """Lay out a step of any mix.

        Args:
            chunks: decodes first, all of one length.
            token_ids: of all chunks, in order.
            sources: of each token, see ``StepInputs``.
            rows: padded rows; None pads to the next multiple of ``ROW_BUCKET``.
        """
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        host_lengths = [chunk.length for chunk in chunks]
        lengths = np.array(host_lengths, dtype=np.int64)
        tokens, sequences = sum(host_lengths), len(chunks)
        assert tokens == len(token_ids), f"{len(token_ids)} token ids for {tokens} scheduled tokens"
        padded = -(-tokens // ROW_BUCKET) * ROW_BUCKET if rows is None else rows
        assert padded >= tokens, f"{tokens} tokens do not fit {padded} rows"
        offsets = list(accumulate(host_lengths, initial=0))
        block_table = self._block_table(chunks, sequences + 1, max(len(chunk.block_ids) for chunk in chunks))

        columns = np.zeros((3, padded), dtype=np.int64)
        token_rows, positions, ids = columns
        ids[:tokens] = token_ids
        token_rows[tokens:] = sequences
        if tokens == sequences:  # one token each: the usual decode
            token_rows[:tokens] = np.arange(sequences)
            positions[:tokens] = starts
        else:
            token_rows[:tokens] = np.repeat(np.arange(sequences), lengths)
            positions[:tokens] = np.arange(tokens) - np.repeat(np.array(offsets[:-1]) - starts, lengths)
        block, place = np.divmod(positions, self.block_size)
        blocks = block_table[token_rows, block]

        num_decode = sum(chunk.is_decode for chunk in chunks)
        assert all(chunk.is_decode for chunk in chunks[:num_decode]), "decode chunks must come first"
        assert not any(chunk.splits for chunk in chunks[:num_decode]), "a decode keeps no state on its way"
        assert len(set(host_lengths[:num_decode])) <= 1, f"decode lengths differ: {host_lengths[:num_decode]}"
        slots = tuple(chunk.slot for chunk in chunks)
        ends = np.flatnonzero((positions[:tokens] + 1) % self.kpool == 0)
        layout = _Layout(
            ids,
            positions,
            token_rows,
            blocks * self.block_size + place,
            self._in_pool(blocks) * self.block_size + place,
            block_table,
            None,
            self._sources(sources, padded),
            self._seats(chunks, sequences),
        )
        return self._assemble(
            layout,
            starts=starts,
            lengths=lengths,
            slots=np.array(slots, dtype=np.int64),
            ends=ends,
            entries=self._entries(positions[ends], blocks[ends]),
            num_tokens=tokens,
            num_decode=num_decode,
            segments=tuple(
                Segment(start, chunk.length, row, chunk.start)
                for row, (start, chunk) in enumerate(zip(offsets, chunks, strict=False))
            ),
            host_slots=slots,
            kept=tuple(chunk.splits for chunk in chunks) if any(chunk.splits for chunk in chunks) else (),
        )

    def build_uniform(
        self,
        chunks: Sequence[Chunk],
        token_ids: Sequence[int],
        *,
        rows: int,
        sources: Sequence[int] | None = None,
    ) -> StepInputs:
        """Lay out a step of one decode token a sequence, padded to ``rows``, in shapes that follow from ``rows``."""
        tokens = len(chunks)
        assert self.capturable, "uniform steps are for devices that capture"
        assert tokens == len(token_ids) <= rows, f"{len(token_ids)} tokens of {tokens} sequences in {rows} rows"
        assert all(chunk.is_decode and chunk.length == 1 for chunk in chunks), "not a uniform decode"
        positions, slots, ids, context_lens = np.zeros((4, rows), dtype=np.int64)
        positions[:tokens] = [chunk.start for chunk in chunks]
        slots[:tokens] = [chunk.slot for chunk in chunks]
        slots[tokens:] = SCRATCH_SLOT
        ids[:tokens] = token_ids
        context_lens[:tokens] = positions[:tokens] + 1
        narrow = self.kv_places is None and rows * self.max_blocks >= WIDE_TABLE  # by shapes, as addresses are
        width = max((len(chunk.block_ids) for chunk in chunks), default=1) if narrow else self.max_blocks
        block_table = self._block_table(chunks, rows, width)
        token_rows = np.arange(rows)
        block, place = np.divmod(positions, self.block_size)
        blocks = block_table[token_rows, block]
        completes = (positions + 1) % self.kpool == 0
        completes[tokens:] = False
        entries = self._entries(positions, np.where(completes, blocks, SCRATCH_BLOCK))
        layout = _Layout(
            ids,
            positions,
            token_rows,
            blocks * self.block_size + place,
            self._in_pool(blocks) * self.block_size + place,
            Narrow(block_table, self.max_blocks) if narrow else block_table,
            context_lens,
            self._sources(sources, rows),
            self._seats(chunks, rows),
        )
        return self._assemble(
            layout,
            starts=positions,
            lengths=np.ones(rows, dtype=np.int64),
            slots=slots,
            ends=token_rows,
            entries=entries,
            num_tokens=tokens,
            num_decode=tokens,
            segments=(),
            host_slots=(),
        )

    def scratch(self, *, rows: int, uniform: bool, decode: bool = False) -> StepInputs:
        """A step that touches scratch memory only, for warm-up and capture.

        Args:
            rows: of a uniform step all are padding; of any other none: prefills as long as a sequence may be, and with
                ``decode`` the second token of a sequence in front of them, so that what only mixed batches run is
                compiled as well.
        """
        if uniform:
            return self.build_uniform((), (), rows=rows)
        longest = self.max_model_len or max(self.max_blocks * self.block_size, 1)
        first = int(decode and rows > 1 and longest > 1)
        two = (SCRATCH_BLOCK,) * -(-2 // self.block_size)
        chunks = [Chunk("scratch decode", 1, 1, two, SCRATCH_SLOT, is_decode=True, samples=False)] * first
        for done in range(first, rows, longest):
            length = min(longest, rows - done)
            blocks = (SCRATCH_BLOCK,) * -(-length // self.block_size)
            chunks.append(Chunk("scratch", 0, length, blocks, SCRATCH_SLOT, is_decode=False, samples=False))
        return self.build(chunks, [0] * rows, rows=rows)

    def _ring_length(self, window: int) -> int:
        return window - 1 + self.rollback

    def _sources(self, sources: Sequence[int] | None, rows: int) -> Array | None:
        if sources is None:
            return None
        padded = np.full(rows, -1, dtype=np.int64)
        padded[: len(sources)] = sources
        return padded

    def _block_table(self, chunks: Sequence[Chunk], rows: int, width: int) -> Array:
        table = np.full((rows, max(width, 1)), SCRATCH_BLOCK, dtype=np.int64)
        for row, chunk in enumerate(chunks):
            table[row, : len(chunk.block_ids)] = chunk.block_ids
        return table

    def _in_pool(self, blocks: Array) -> Array:
        """Places of blocks' KV rows."""
        return blocks if self.kv_places is None else self.kv_places.places(blocks)

    def _seats(self, chunks: Sequence[Chunk], rows: int) -> Array | None:
        if self.kv_places is None:
            return None
        seats = np.zeros(rows, dtype=np.int64)
        seats[: len(chunks)] = self.kv_places.seats(chunks)
        return seats

    def _entries(self, positions: Array, blocks: Array) -> Array:
        """Rows of the flat index keys for the pools that end at ``positions``."""
        return blocks * (self.block_size // self.kpool) + positions % self.block_size // self.kpool

    def _assemble(
        self,
        layout: _Layout,
        *,
        starts: Array,
        lengths: Array,
        slots: Array,
        ends: Array,
        entries: Array,
        num_tokens: int,
        num_decode: int,
        segments: tuple[Segment, ...],
        host_slots: tuple[int, ...],
        kept: tuple[tuple[Split, ...], ...] = (),
    ) -> StepInputs:
        """Plan the rings, bring everything to the device in one go, hand it out."""
        uniform, padded = layout.context_lens is not None, len(layout.token_ids)
        plans = {
            window: plan_ring(starts, lengths, slots.tolist(), window=window, ring_length=self._ring_length(window))
            for window in {self.conv_size, self.kpool if self.kpool > 1 else 0} - {0}
        }
        # Those of a fixed size first: behind them, addresses depend on what the step holds.
        arrays: list[Array | Narrow] = [layout.token_ids, layout.positions, layout.token_rows, layout.slot_mapping]
        arrays += [layout.block_table, slots, starts]
        arrays += [tensor.numpy() for plan in plans.values() for tensor in plan.tensors]
        arrays += [ends, entries] if self.kpool > 1 else []
        hosted: list[Array] = []
        if layout.seats is not None:
            assert not isinstance(layout.block_table, Narrow), "places of blocks are those of a whole table"
            hosted = [self._in_pool(layout.block_table), layout.seats, layout.key_mapping]
        arrays += [*hosted, *(extra for extra in (layout.context_lens, layout.sources) if extra is not None)]
        keeping = None  # the convolution's ring alone is another state's as well
        if kept and self.conv_size:
            keeping = plans[self.conv_size].with_kept(starts.tolist(), lengths.tolist(), slots.tolist(), kept)
            arrays += [tensor.numpy() for tensor in keeping.tensors[2:]]
        placed = iter(self.place(arrays))
        ids, positions, token_rows, slot_mapping, table, slots_dev, starts_dev = (next(placed) for _ in range(7))
        rings: dict[int, RingPlan] = {
            window: plan.moved([next(placed) for _ in plan.tensors]) for window, plan in plans.items()
        }
        pools = PoolPlan(rings[self.kpool], next(placed), next(placed)) if self.kpool > 1 else None
        kv_table, seats, key_mapping = (next(placed) for _ in range(3)) if hosted else (table, None, slot_mapping)
        return StepInputs(
            num_tokens=num_tokens,
            num_padded_tokens=padded,
            num_decode=num_decode,
            uniform=uniform,
            capturable=self.capturable,
            token_ids=ids,
            positions=positions,
            token_rows=token_rows,
            slot_mapping=slot_mapping,
            key_mapping=key_mapping,
            block_table=table,
            kv_table=kv_table,
            seats=seats,
            context_lens=next(placed) if uniform else None,
            sources=next(placed) if layout.sources is not None else None,
            block_size=self.block_size,
            segments=segments,
            slots=slots_dev,
            starts=starts_dev,
            host_slots=host_slots,
            conv=self._placed_conv(rings, keeping, placed),
            pools=pools,
            kept=kept,
        )

    def _placed_conv(
        self, rings: dict[int, RingPlan], keeping: RingPlan | None, placed: Iterator[torch.Tensor]
    ) -> RingPlan | None:
        """The convolution's plan; what keeps states has two tensors of the plan without, and the rest of its own."""
        plain = rings.get(self.conv_size)
        if plain is None or keeping is None:
            return plain
        return keeping.moved([*plain.tensors[:2], *(next(placed) for _ in keeping.tensors[2:])])


@dataclass(frozen=True, slots=True)
class _Layout:
    """Host arrays of a step's rows; ``context_lens`` in a uniform step, ``sources`` where tokens are unknown, ``seats``
    with a host pool."""

    token_ids: Array
    positions: Array
    token_rows: Array
    key_mapping: Array
    slot_mapping: Array
    block_table: Array | Narrow
    context_lens: Array | None
    sources: Array | None
    seats: Array | None
