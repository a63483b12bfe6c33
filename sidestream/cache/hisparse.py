"""HiSparse: KV rows that live in the host pool, and the hot copies of them that decode reads on the device.

The host knows where every block is. Which rows of a step's selection are in hot slots, only the device knows: each
index group resolves that once a step, on its side stream, and has the missing rows of its layers copied there, the
leader's first. A prefill, which may select from all of its context, gets the host blocks of its sequence staged, layer
after layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
import torch

from sidestream.cache.hosted_rows import HostedRows
from sidestream.cache.placement import BlockPlacement, Moves, Spill
from sidestream.cache.seats import Seats
from sidestream.core.batch import Chunk
from sidestream.core.step_inputs import StepInputs
from sidestream.ops.index_map import logical_to_physical
from sidestream.ops.residency import clear_seats, new_state, resolve
from sidestream.ops.row_copy import copy_rows
from sidestream.streams import Handoff, Streams
from sidestream.streams.upload import Array, PackedUpload


@dataclass(frozen=True, slots=True)
class HiSparseStats:
    """Since the engine started.

    Attributes:
        selected_rows: rows of host blocks that decodes selected, over all index groups; a group's layers share them.
        missed_rows: those that had to be copied from the host, once for each layer of their group.
        spilled_blocks, spilled_bytes: copied to the host, over all layers.
        restored_blocks, restored_bytes: copied back for good, while the device had room to spare.
        staged_bytes: copied from the host for prefills.
        free_device_blocks, free_host_blocks: now.
    """

    selected_rows: int
    missed_rows: int
    spilled_blocks: int
    spilled_bytes: int
    restored_blocks: int
    restored_bytes: int
    staged_bytes: int
    free_device_blocks: int
    free_host_blocks: int

    @property
    def hit_rate(self) -> float:
        """Share of the selected rows of host blocks that lay in hot slots; 1 if none was selected."""
        return 1 - self.missed_rows / self.selected_rows if self.selected_rows else 1.0


class HiSparseRuntime:
    """Moves blocks between steps and tells each step where its rows are. All work goes to the current stream, but the
    copies of blocks that leave ahead of need or come back, which run beside the step.

    Args:
        rows: the memory.
        layers: with KV rows.
        max_seqs, max_blocks: of a step and of a sequence.

    Attributes:
        spilled_bytes, restored_bytes, staged_bytes: copied so far to the host, back for good, and back for prefills.
    """

    def __init__(
        self,
        placement: BlockPlacement,
        rows: HostedRows,
        *,
        layers: Sequence[int],
        streams: Streams,
        max_seqs: int,
        max_blocks: int,
    ) -> None:
        self.placement, self.arena, self.host, self.sizes = placement, rows.arena, rows.host, rows.sizes
        self.max_blocks = max_blocks
        self.layers = tuple(layers)
        self.spilled_bytes = self.restored_bytes = self.staged_bytes = 0
        self._copied = np.zeros(rows.sizes.host_blocks + 1, dtype=np.bool_)
        """Which places of the host pool were copied to."""
        self._stats = HiSparseStats(*[0] * len(fields(HiSparseStats)))
        self.spare_host_row = rows.sizes.host_blocks * placement.block_size
        self._streams = streams
        self._side = None if streams.backend.device.type == "cpu" else streams.new_stream("spills")
        self._rows_written = Handoff(
            streams, "KV rows of the last step", producer="compute", consumers=("copies of blocks that move",)
        )
        self._moved = Handoff(
            streams,
            "blocks that moved",
            producer="copies of blocks that move",
            consumers=("compute, before it goes on",),
        )
        self._seats = Seats(rows.sizes.seats)
        self._step_seats: list[int] = []
        self._groups: list[HiSparseTopK] = []
        self._moves = Moves()
        staged_rows = rows.sizes.staged * placement.block_size
        self._upload = PackedUpload(
            streams.backend,
            PackedUpload.elements([(max_seqs + 1) * max_blocks, staged_rows, 1]),
        )
        self._fresh = PackedUpload(streams.backend, PackedUpload.elements([rows.sizes.seats]))
        self.staged_table: torch.Tensor | None = None
        """[R + 1, B] of this step: which staging place holds a block, -1 for none; None if no prefill needs any."""
        self._staged_rows: torch.Tensor | None = None
        self._staged_count: torch.Tensor | None = None
        self._staging_rows = torch.arange(staged_rows, device=streams.backend.device)

    def places(self, blocks: Array) -> Array:
        """Where blocks are: places on the device, or -1 - places in the host pool.

        Raises:
            AssertionError: something asks for rows that were never written, or never copied to the host.
        """
        held = self.placement.table[blocks]
        on_host = held < 0
        if on_host.any():
            missing = blocks[on_host][~self._copied[-1 - held[on_host]]]
            assert not missing.size, f"rows of blocks {sorted(set(missing.tolist()))} are asked for, and are nowhere"
        return held

    def seats(self, chunks: Sequence[Chunk]) -> list[int]:
        """As ``begin_step`` assigned them; scratch for chunks of captures."""
        return self._step_seats or [0] * len(chunks)

    def new_group(self, decode_rows: int) -> HiSparseTopK:
        """The resolver of one index group."""
        group = HiSparseTopK(self, decode_rows)
        self._groups.append(group)
        return group

    @property
    def table_bytes(self) -> int:
        """Device bytes of every group's tables."""
        return sum(tensor.numel() * tensor.itemsize for group in self._groups for tensor in group.tables)

    def begin_step(self, chunks: Sequence[Chunk]) -> None:
        """Before a step's inputs are laid out: blocks that must leave do, new owners of hot slots find them empty.

        Raises:
            CapacityError: see ``BlockPlacement.plan``.
        """
        self._moves = self.placement.plan(chunks)
        self._copied[[spill.host for spill in (*self._moves.now, *self._moves.ahead)]] = False
        self._copy_out(self._moves.now)
        self._step_seats, fresh = self._seats.assign(chunks)
        if fresh:
            (cleared,) = self._fresh.place([np.array(fresh, dtype=np.int64)])
            for group in self._groups:
                clear_seats(group.slots, cleared)
        self._stage(chunks)
        if self._moves.beside:
            self._rows_written.publish()
            with self._streams.backend.use(self._side or self._streams.compute):
                self._rows_written.wait()
                self._copy_out(self._moves.ahead)
                self._copy_back(self._moves.back)
                self._moved.publish()

    def end_step(self) -> None:
        """Behind a step: the next one writes to the places of blocks that left, and reads those that came back."""
        if self._moves.beside:
            self._moved.wait()
        self._moves, self._step_seats = Moves(), []
        self.staged_table = None

    def counters(self) -> dict[str, int]:
        """``stats`` by name, without waiting for the device: rows as of the last call of ``stats``."""
        return asdict(replace(self._stats, **self._host_counters()))

    def stats(self) -> HiSparseStats:
        """What happened so far; waits for the current stream, which is to be the one that computes."""
        pairs = [group.totals() for group in self._groups]
        self._stats = HiSparseStats(
            selected_rows=sum(selected for selected, _ in pairs),
            missed_rows=sum(missed for _, missed in pairs),
            **self._host_counters(),
        )
        return self._stats

    def _host_counters(self) -> dict[str, int]:
        return {
            "spilled_blocks": self.placement.num_spilled,
            "spilled_bytes": self.spilled_bytes,
            "restored_blocks": self.placement.num_restored,
            "restored_bytes": self.restored_bytes,
            "staged_bytes": self.staged_bytes,
            "free_device_blocks": self.placement.num_free_device,
            "free_host_blocks": self.placement.num_free_host,
        }

    def reset(self) -> None:
        """After a step that failed: forget what lies where; sequences are computed anew."""
        self.placement.reset()
        self._seats.reset()
        self._copied[:] = False
        self._moves, self._step_seats, self.staged_table = Moves(), [], None

    def _copy_out(self, spills: Sequence[Spill]) -> None:
        for layer in self.layers if spills else ():
            for spill in spills:
                source, target = self._rows_of(spill, layer)
                target.copy_(source, non_blocking=True)
                self.spilled_bytes += source.numel() * source.itemsize
        for spill in spills:
            self._copied[spill.host] = True

    def _copy_back(self, spills: Sequence[Spill]) -> None:
        for layer in self.layers if spills else ():
            for spill in spills:
                target, source = self._rows_of(spill, layer)
                target.copy_(source, non_blocking=True)
                self.restored_bytes += source.numel() * source.itemsize

    def _rows_of(self, spill: Spill, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A block's rows on the device, and those in the host pool."""
        rows = self.placement.block_size
        device, host = self.arena.layer(layer), self.host.layer(layer)
        return device[spill.device * rows :][:rows], host[spill.host * rows :][:rows]

    def _stage(self, chunks: Sequence[Chunk]) -> None:
        """Plan which host blocks the step's prefills read, each once."""
        if all(chunk.is_decode for chunk in chunks):
            return
        places: dict[int, int] = {}
        width = max(len(chunk.block_ids) for chunk in chunks)
        table = np.full((len(chunks) + 1, width), -1, dtype=np.int64)
        for row, chunk in enumerate(chunks):
            if chunk.is_decode:
                continue
            held = self.placement.table[list(chunk.block_ids)]
            for column in np.flatnonzero(held < 0).tolist():
                table[row, column] = places.setdefault(int(-1 - held[column]), len(places))
        if not places:
            return
        assert len(places) <= self.sizes.staged, f"{len(places)} host blocks to stage, room for {self.sizes.staged}"
        rows = self.placement.block_size
        source = (np.array(list(places), dtype=np.int64)[:, None] * rows + np.arange(rows)).reshape(1, -1)
        count = np.array([source.shape[1]], dtype=np.int64)
        self.staged_table, self._staged_rows, self._staged_count = self._upload.place([table, source, count])

    def stage_layer(self, layer: int) -> None:
        """Bring the host blocks of this step's prefills to the staging places, for one layer."""
        assert self._staged_rows is not None
        assert self._staged_count is not None
        staging = self.arena.staging
        copy_rows(
            staging,
            self.host.layer(layer),
            to=self._staging_rows[: self._staged_rows.shape[1]].view(1, -1),
            source=self._staged_rows,
            counts=self._staged_count.int(),
            spare=(0, self.spare_host_row),
        )
        self.staged_bytes += self._staged_rows.shape[1] * staging.shape[1] * staging.itemsize


class HiSparseTopK:
    """Implements ``TopKResolver`` for one index group.

    Attributes:
        slots: state of the group's hot slots, see ``ops.residency``.
        misses: [rows] int32 of the last step: how many rows each decode brought from the host, a layer.
    """

    def __init__(self, runtime: HiSparseRuntime, decode_rows: int) -> None:
        self._runtime = runtime
        sizes, placement = runtime.sizes, runtime.placement
        device = runtime.arena.staging.device
        positions = runtime.max_blocks * placement.block_size
        self._slot_of, self.slots = new_state(sizes.seats, sizes.slots, positions, device=device)
        self._lists = torch.zeros(2, decode_rows, sizes.slots, dtype=torch.int64, device=device)
        self.misses = torch.zeros(decode_rows, dtype=torch.int32, device=device)
        self._totals = torch.zeros(sizes.seats, 2, dtype=torch.int64, device=device)
        self._requests = 0

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """What the group keeps on the device."""
        return self._slot_of, self.slots, self._lists, self.misses, self._totals

    def totals(self) -> tuple[int, int]:
        """Rows of host blocks that decodes selected so far, and how many of them were in no hot slot; waits for
        the current stream."""
        selected, missed = self._totals.sum(dim=0).tolist()
        return selected, missed

    @property
    def needs_one_stream(self) -> bool:
        """Prefills read staging places that every layer fills anew, so nothing of such a step may run ahead."""
        return self._runtime.staged_table is not None

    def resolve(
        self, logical: torch.Tensor, inputs: StepInputs, *, physical: torch.Tensor, counts: torch.Tensor
    ) -> None:
        runtime = self._runtime
        decodes = logical.shape[0] if inputs.uniform else inputs.num_decode_tokens
        requests = decodes if inputs.uniform else inputs.num_decode
        if decodes:
            assert inputs.seats is not None
            resolve(
                logical[:decodes],
                inputs.kv_table,
                self._slot_of,
                self.slots,
                seats=inputs.seats[:requests],
                positions=inputs.positions[:decodes],
                table_rows=inputs.token_rows[:decodes],
                block_size=inputs.block_size,
                hot_base=runtime.arena.hot_base,
                out=physical[:decodes],
                counts=counts[:decodes],
                host_rows=self._lists[0, :requests],
                hot_rows=self._lists[1, :requests],
                misses=self.misses[:requests],
                totals=self._totals,
            )
        self._requests = requests
        if decodes < logical.shape[0]:
            self._map_prefills(inputs.kv_table, logical, inputs, physical, counts, first=decodes)

    def fetch(
        self, layer: int, logical: torch.Tensor, inputs: StepInputs, *, physical: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Bring what a layer's rows lack on the device."""
        runtime = self._runtime
        requests = self._requests
        if requests:
            copy_rows(
                runtime.arena.layer(layer),
                runtime.host.layer(layer),
                to=self._lists[1, :requests],
                source=self._lists[0, :requests],
                counts=self.misses[:requests],
                spare=(runtime.arena.hot_base, runtime.spare_host_row),
            )
        staged = runtime.staged_table
        if staged is not None:
            runtime.stage_layer(layer)
            table = torch.where(staged >= 0, staged + runtime.arena.first_staged(layer), inputs.kv_table)
            self._map_prefills(table, logical, inputs, physical, counts, first=inputs.num_decode_tokens)

    def _map_prefills(
        self,
        table: torch.Tensor,
        logical: torch.Tensor,
        inputs: StepInputs,
        physical: torch.Tensor,
        counts: torch.Tensor,
        *,
        first: int,
    ) -> None:
        logical_to_physical(
            logical[first:],
            table,
            token_rows=inputs.token_rows[first : logical.shape[0]],
            block_size=inputs.block_size,
            out=physical[first:],
            counts=counts[first:],
        )
