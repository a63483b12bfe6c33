"""Sequences that run, in order of arrival, and the memory that they own: who gets it, and who loses it at need."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from sidestream.cache.slots import SlotPool
from sidestream.core.batch import Admission
from sidestream.scheduler.config import SchedulerConfig
from sidestream.scheduler.integrity import check_blocks
from sidestream.scheduler.prefixes import Prefixes
from sidestream.scheduler.sequence import Sequence, by_arrival

Plan = dict[Sequence, int]
"""Tokens of each sequence in the step being planned."""


@dataclass(slots=True)
class Losses:
    """What preemption did, in numbers that only grow."""

    preemptions: int = 0
    recomputed_tokens: int = 0


class Running:
    """Owners of blocks and slots. Whoever is preempted waits again, in ``prefixes.waiting``, and leaves the plan."""

    def __init__(self, config: SchedulerConfig, prefixes: Prefixes, losses: Losses) -> None:
        self._most = config.max_running
        self._prefixes = prefixes
        self._losses = losses
        self._blocks = prefixes.blocks
        self._slots = SlotPool(config.num_slots) if config.uses_slots else None
        self._sequences: list[Sequence] = []
        self._preempted: list[str] = []
        self._admitted: list[Admission] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def seats(self) -> int:
        """How many more may run."""
        return self._most - len(self._sequences)

    @property
    def num_free_slots(self) -> int:
        return self._slots.num_free if self._slots is not None else 0

    @property
    def num_preempted(self) -> int:
        """Since the last step."""
        return len(self._preempted)

    def take_news(self) -> tuple[tuple[str, ...], tuple[Admission, ...]]:
        """Who was preempted and who was admitted since the last step."""
        news = tuple(self._preempted), tuple(self._admitted)
        self._preempted.clear()
        self._admitted.clear()
        return news

    def grow(self, sequence: Sequence, num_tokens: int, plan: Plan) -> bool:
        """Make a sequence own blocks for ``num_tokens``, preempting the latest arrivals; False if that was itself."""
        pool = self._blocks
        if pool is None:
            return True
        missing = pool.blocks_for(num_tokens) - len(sequence.block_ids)
        if missing <= 0:
            return True
        while (blocks := pool.allocate(missing)) is None:
            victim = self._sequences[-1]
            plan.pop(victim, None)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_ids += tuple(blocks)
        return True

    def make_room(self, sequence: Sequence, share: int, plan: Plan) -> int:
        """Give a prefill blocks for up to ``share`` tokens; others lose theirs only if it gets nothing else."""
        pool = self._blocks
        if pool is None:
            return share
        if self.is_stuck(sequence):
            return 0
        self.grow(sequence, sequence.num_computed + 1, plan)
        most = (len(sequence.block_ids) + pool.num_free) * pool.block_size - sequence.num_computed
        share = min(share, most)
        grown = self.grow(sequence, sequence.num_computed + share, plan)
        assert grown, f"{sequence.request_id} was preempted for its own {share} tokens"
        return share

    def is_stuck(self, sequence: Sequence) -> bool:
        """A prefill that needs a block when none is free, and is the latest, so has nobody to take it from."""
        pool = self._blocks
        if pool is None or pool.num_free or self._sequences[-1] is not sequence:
            return False
        return sequence.num_computed == len(sequence.block_ids) * pool.block_size

    def admit(self, sequence: Sequence, share: int) -> bool:
        """Let a candidate run; False if what it would take over was just handed out for other content."""
        assert share > 0, f"{sequence.request_id} is admitted to do nothing"
        if not self._prefixes.holds(sequence):
            return False
        if self._slots is not None:
            slot = self._slots.allocate()
            assert slot is not None, f"no slot for {sequence.request_id} with {len(self)} running"
            sequence.slot = slot
        self._admitted.append(self._prefixes.admit(sequence))
        if self._blocks is not None:
            missing = self._blocks.blocks_for(sequence.num_computed + share) - len(sequence.block_ids)
            blocks = self._blocks.allocate(missing)
            assert blocks is not None, f"no {missing} blocks for {share} tokens, {self._blocks.num_free} are free"
            sequence.block_ids += tuple(blocks)
        sequence.running = True
        sequence.preempted = False
        insort(self._sequences, sequence, key=by_arrival)
        return True

    def remove(self, sequence: Sequence) -> None:
        """It runs no more, and gives up its memory."""
        self._sequences.remove(sequence)
        self._prefixes.lose(sequence)
        if self._blocks is not None:
            self._blocks.release(sequence.block_ids)
        if self._slots is not None:
            self._slots.release(sequence.slot)
        sequence.restart()

    def _preempt(self, sequence: Sequence) -> None:
        self._losses.preemptions += 1
        self._losses.recomputed_tokens += sequence.num_computed
        self.remove(sequence)
        sequence.preempted = True
        self._prefixes.waiting.add(sequence)
        self._preempted.append(sequence.request_id)

    def count_all_lost(self) -> None:
        """All of them lose their memory at once, with the pools."""
        self._losses.preemptions += len(self)
        self._losses.recomputed_tokens += sum(sequence.num_computed for sequence in self)

    def check_integrity(self) -> None:
        """Recount owners and pools; an AssertionError names what differs."""
        assert self.seats >= 0, f"{len(self)} sequences run, {self._most} may"
        if self._blocks is not None:
            check_blocks(self._blocks, self._sequences)
        if self._slots is not None:
            self._slots.check_integrity({s.request_id: s.slot for s in self})
