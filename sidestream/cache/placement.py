"""Where each KV block lies: on the device, or in the host pool once the device is short of room.

Sequences, the prefix cache and the index keys know blocks by one number for life. Only the KV rows of a block move, and
only this module knows where they are: a step asks before it runs, and is told what must be copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from sidestream.core.batch import SCRATCH_BLOCK, Chunk
from sidestream.errors import CapacityError

BACK_A_STEP = 4
"""Blocks that come back to the device beside one step: their copies must not outlast it."""
ASKED_A_STEP = 32
"""Blocks looked at in a step for what nobody needs any more, so that the host spends some microseconds on it."""


@dataclass(frozen=True, slots=True)
class Spill:
    """A block's rows are copied between the device and the host pool; the numbers are those of the two pools."""

    device: int
    host: int


@dataclass(frozen=True, slots=True)
class Moves:
    """What a step copies.

    Attributes:
        now: before the step runs, since it writes to those places of the device.
        ahead: while it runs; the places are free for the step behind it.
        back: while it runs, from the host to the device; the step behind it finds those blocks there.
    """

    now: tuple[Spill, ...] = ()
    ahead: tuple[Spill, ...] = ()
    back: tuple[Spill, ...] = ()

    @property
    def beside(self) -> bool:
        """Whether anything is copied while the step runs."""
        return bool(self.ahead or self.back)


class BlockPlacement:
    """Places for ``num_device - 1 + num_host`` blocks; place 0 of the device is scratch and holds block 0.

    A block gets a place on the device when a step first writes to it and keeps it while there is room. When less than
    ``watermark`` places are free, full blocks are copied to the host, those written or taken over longest ago first.
    What a step writes to stays on the device, as does every block that is not full. While more than twice the watermark
    is free beside a block for each sequence, steps of decodes bring up to ``BACK_A_STEP`` blocks of one sequence back,
    of another one in the next step: what came back does not leave at once.

    Args:
        is_dead: whether a block has neither an owner nor content that anybody could ask for.
    Attributes:
        table: [num_blocks] int64: the place on the device, or -1 - the place in the host pool; ``nowhere`` for blocks
            that hold nothing.
        nowhere: stands for the place behind the last one of the host pool, which nobody fills.
        num_spilled, num_restored: blocks copied to the host and back so far.
        is_dead: as given; may be set later.
    Raises:
        CapacityError: there would be no place beside scratch.
    """

    def __init__(
        self,
        *,
        num_device: int,
        num_host: int,
        block_size: int,
        watermark: int = 0,
        is_dead: Callable[[int], bool] = lambda block: False,
    ) -> None:
        if num_device < 2:
            raise CapacityError(f"a pool of {num_device} KV blocks on the device has none beside scratch")
        self.num_device, self.num_host, self.block_size = num_device, num_host, block_size
        self.watermark = watermark
        self.num_blocks = num_device + num_host
        self.nowhere = -1 - num_host
        self.table: npt.NDArray[np.int64] = np.full(self.num_blocks, self.nowhere, dtype=np.int64)
        self.num_spilled = self.num_restored = 0
        self.is_dead = is_dead
        self._free_device: list[int] = []
        self._free_host: list[int] = []
        self._placed: set[int] = set()
        self._full: OrderedDict[int, None] = OrderedDict()
        """Full blocks on the device, least recently used first."""
        self._leaving: dict[int, Spill] = {}
        """Blocks on the device whose copies are under way."""
        self._returning: dict[int, Spill] = {}
        """Blocks of the host pool whose copies are under way."""
        self._turn = 0
        self._asked: list[int] = []
        self.reset()

    @property
    def num_free_device(self) -> int:
        return len(self._free_device)

    @property
    def num_free_host(self) -> int:
        return len(self._free_host)

    def plan(self, chunks: Sequence[Chunk]) -> Moves:
        """Give every block that a step writes to a place on the device.

        Raises:
            CapacityError: the step writes to more blocks than the device has; nothing changed but what was copied
                before.
        """
        self._settle()
        written = [block for chunk in chunks for block in self._written(chunk)]
        for chunk in chunks:
            if not chunk.is_decode:  # taken over from others, or come back
                self._use(block for block in chunk.block_ids if block in self._full)
        fresh = [block for chunk in chunks for block in self._begun(chunk)]
        for block in fresh:
            self._forget_content(block)
        needed = sum(block not in self._placed for block in fresh)
        busy = set(written)
        now = self._make_room(needed, busy)
        for block in fresh:
            if block not in self._placed:
                self.table[block] = self._free_device.pop()
                self._placed.add(block)
        assert all(self.table[block] > 0 for block in written), "a block that is not full has left the device"
        for chunk in chunks:
            self._use(self._filled(chunk))
        ahead = self._spill(self.watermark, busy)
        calm = not (now or ahead) and all(chunk.is_decode for chunk in chunks)
        return Moves(tuple(now), tuple(ahead), tuple(self._restore(chunks)) if calm else ())

    def reset(self) -> None:
        """Forget every block: after a step that failed nobody knows which copies were made."""
        self.table[:] = self.nowhere
        self.table[SCRATCH_BLOCK] = SCRATCH_BLOCK
        self._free_device = list(range(self.num_device - 1, 0, -1))
        self._free_host = list(range(self.num_host - 1, -1, -1))
        self._placed.clear()
        self._full.clear()
        self._leaving.clear()
        self._returning.clear()

    def on_host(self, blocks: Iterable[int]) -> bool:
        """Whether a step that reads these blocks finds some in the host pool."""
        held = self.table[list(blocks)]
        return bool(((held < 0) & (held != self.nowhere)).any())

    def check_integrity(self) -> None:
        """Recount.

        Raises:
            AssertionError: with what disagrees.
        """
        device = [int(self.table[block]) for block in self._placed if self.table[block] >= 0]
        host = [int(-1 - self.table[block]) for block in self._placed if self.table[block] < 0]
        host += [spill.host for spill in self._leaving.values()]
        device += [spill.device for spill in self._returning.values()]
        for name, used, free, every in (
            ("device", device, self._free_device, range(1, self.num_device)),
            ("host", host, self._free_host, range(self.num_host)),
        ):
            assert sorted(used + free) == list(every), f"{name} places: {sorted(used)} used, {sorted(free)} free"
        assert all(self.table[block] >= 0 for block in self._full), "a full block of the device is not on it"
        assert set(self._leaving) <= set(self._full), "a block leaves that is not on the device"
        assert all(-1 - self.table[block] == spill.host for block, spill in self._returning.items()), "it has left"
        nowhere = set(range(1, self.num_blocks)) - self._placed
        assert (self.table[list(nowhere)] == self.nowhere).all(), "a block that holds nothing has a place"

    def _written(self, chunk: Chunk) -> list[int]:
        return self._blocks(chunk, chunk.start // self.block_size, -(-chunk.end // self.block_size))

    def _begun(self, chunk: Chunk) -> list[int]:
        """Blocks whose first row the chunk writes: what they held before is of no use."""
        return self._blocks(chunk, -(-chunk.start // self.block_size), -(-chunk.end // self.block_size))

    def _filled(self, chunk: Chunk) -> list[int]:
        return self._blocks(chunk, chunk.start // self.block_size, chunk.end // self.block_size)

    def _blocks(self, chunk: Chunk, first: int, end: int) -> list[int]:
        """Some of a chunk's; scratch, which warm-up writes to, has its place for good."""
        return [block for block in chunk.block_ids[first:end] if block != SCRATCH_BLOCK]

    def _use(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._full[block] = None
            self._full.move_to_end(block)

    def _forget_content(self, block: int) -> None:
        """The block begins anew; a place on the device stays its own."""
        self._full.pop(block, None)
        spill = self._leaving.pop(block, None)
        if spill is not None:
            self._free_host.append(spill.host)
        if block in self._placed and self.table[block] < 0:
            self._free_host.append(int(-1 - self.table[block]))
            self._placed.discard(block)
            self.table[block] = self.nowhere

    def _settle(self) -> None:
        """Copies of the last step are done before this one runs."""
        for block, spill in self._leaving.items():
            self._full.pop(block)
            self._free_device.append(spill.device)
            self.table[block] = -1 - spill.host
        self._leaving.clear()
        for block, back in self._returning.items():
            self.table[block] = back.device
            self._free_host.append(back.host)
            self._use((block,))
        self._returning.clear()

    def _make_room(self, needed: int, busy: set[int]) -> list[Spill]:
        spills = self._spill(needed, busy)
        if needed > len(self._free_device) + len(spills):  # what lies about in blocks that are not full
            for block in [block for block in self._placed if block not in busy and self.is_dead(block)]:
                self._drop(block)
        if needed > len(self._free_device) + len(spills):
            raise CapacityError(
                f"a step writes to {needed} new KV blocks; the device has room for "
                f"{len(self._free_device) + len(spills)}, with {len(self._free_host)} places left in the host pool; "
                "lower max_num_batched_tokens or max_num_seqs, or raise num_blocks, memory_limit or "
                "hisparse_host_memory"
            )
        self._settle()
        return spills

    def _spill(self, wanted: int, busy: set[int]) -> list[Spill]:
        """Let the least recently used full blocks leave until ``wanted`` places are free or will be; blocks that hold
        nothing of use go without a copy."""
        spills: list[Spill] = []
        for block in list(islice(self._full, max(wanted - len(self._free_device), 0) + len(busy))):
            if len(self._free_device) + len(spills) >= wanted:
                break
            if block in busy:
                continue
            if self.is_dead(block):
                self._drop(block)
            elif self._free_host:
                spills.append(Spill(device=int(self.table[block]), host=self._free_host.pop()))
                self._leaving[block] = spills[-1]
        self.num_spilled += len(spills)
        return spills

    def _restore(self, chunks: Sequence[Chunk]) -> list[Spill]:
        """Let host blocks of one of these sequences come back while there is room to spare; another one's next time."""
        if not chunks or len(self._free_host) == self.num_host:
            return []
        self._drop_some_dead()
        room = min(len(self._free_device) - 2 * self.watermark - len(chunks), BACK_A_STEP)
        if room <= 0:
            return []
        self._turn = (self._turn + 1) % len(chunks)
        blocks = np.unique(np.array(chunks[self._turn].block_ids, dtype=np.int64))
        held = self.table[blocks]
        for block in blocks[(held < 0) & (held != self.nowhere)][:room].tolist():
            self._returning[block] = Spill(device=self._free_device.pop(), host=int(-1 - self.table[block]))
        self.num_restored += len(self._returning)
        return list(self._returning.values())

    def _drop_some_dead(self) -> None:
        """Ask of a few blocks on the device, others in each step, whether they still hold anything."""
        if not self._asked:
            self._asked = list(self._placed)
        for _ in range(min(ASKED_A_STEP, len(self._asked))):
            block = self._asked.pop()
            if block in self._placed and self.table[block] > 0 and self.is_dead(block):
                self._drop(block)

    def _drop(self, block: int) -> None:
        self._forget_content(block)
        if block in self._placed:
            self._free_device.append(int(self.table[block]))
            self._placed.discard(block)
            self.table[block] = self.nowhere
