"""Continuous batching: which tokens of which sequences the next step runs, and where they live.

A step is planned (``schedule``) from counts alone and finished (``commit``) when its sampled tokens are known; more
steps may be planned before the first is committed. What is freed while a step is in flight may be handed out at once:
the device runs steps in order.

Policy:
    1. Every decoding sequence gets its one token, in order of arrival.
    2. The rest of the budget is shared equally among prefilling sequences, running and newly admitted ones, at least
       ``prefill_quantum`` tokens each; if there are too many for that, the least recently served go first. So a
       sequence waits for a number of steps that depends on how many others there are, never on how long they are.
    3. Admission is first come, first served: it needs a seat, a slot and the blocks of the first chunk, and leaves
       the watermark free. A preempted sequence comes back when all it had fits again, lest it be preempted at once.
    4. When blocks run out, the latest arrived sequence loses everything it computed and goes back to the front of the
       queue. A prefill takes blocks that way only if it cannot move at all. The earliest running sequence is never
       preempted and each fits the pool alone, so there is always progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from sidestream.cache.block_pool import BlockPool
from sidestream.cache.slots import SlotPool
from sidestream.core.batch import Chunk, ScheduledStep
from sidestream.core.outputs import TokenEvent
from sidestream.core.request import FinishReason, Request
from sidestream.errors import CapacityError, RequestError
from sidestream.scheduler.config import SchedulerConfig
from sidestream.scheduler.fair_share import fair_shares
from sidestream.scheduler.integrity import check_blocks, check_queues
from sidestream.scheduler.sequence import Sequence


class Scheduler:
    """Plans steps and owns blocks and slots.

    Attributes:
        num_preemptions: times a sequence lost its memory.
        num_recomputed_tokens: computed positions thrown away by that.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self._num_arrived = 0
        self._num_steps = 0
        self._reset()

    def _reset(self) -> None:
        config = self.config
        self._blocks = BlockPool(config.num_blocks, config.block_size) if config.uses_blocks else None
        self._slots = SlotPool(config.num_slots) if config.uses_slots else None
        self._sequences: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of arrival, as admission is
        self._in_flight: deque[tuple[int, tuple[Sequence, ...]]] = deque()  # step index, its sampling sequences
        self._preempted: list[str] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.num_free if self._blocks is not None else 0

    @property
    def num_free_slots(self) -> int:
        return self._slots.num_free if self._slots is not None else 0

    def room(self, num_prompt_tokens: int) -> int:
        """Most tokens that can be generated after such a prompt; the last one is never computed, so needs no block."""
        room = self.config.max_model_len - num_prompt_tokens
        pool_tokens = self.config.pool_tokens
        return room if pool_tokens is None else min(room, pool_tokens + 1 - num_prompt_tokens)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: the prompt is empty or too long for ``max_model_len``, or the id is in use.
            CapacityError: the block pool could never hold the prompt.
        """
        name, prompt = request.request_id, len(request.prompt_token_ids)
        if name in self._sequences:
            raise RequestError(f"request id {name!r} is in use by an unfinished request; choose another")
        if prompt == 0:
            raise RequestError(f"request {name!r} has an empty prompt; at least one token is needed")
        if request.max_tokens < 1:
            raise RequestError(f"request {name!r} asks for max_tokens {request.max_tokens}, at least 1 is needed")
        if prompt + 1 > self.config.max_model_len:
            raise RequestError(
                f"request {name!r} has a prompt of {prompt} tokens; with one generated token it passes max_model_len "
                f"{self.config.max_model_len}; shorten the prompt or raise max_model_len"
            )
        if self.room(prompt) < 1:
            raise CapacityError(
                f"request {name!r} has a prompt of {prompt} tokens; the KV block pool holds {self.config.pool_tokens} "
                f"({self.config.num_blocks - 1} blocks of {self.config.block_size}); raise num_blocks or memory_limit"
            )
        sequence = Sequence(
            request,
            arrival=self._num_arrived,
            max_tokens=min(request.max_tokens, self.room(prompt)),
            served_step=self._num_steps - 1,
        )
        self._num_arrived += 1
        self._sequences[name] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is: its memory is free at once, steps in flight drop its result.

        Returns:
            Whether there was such an unfinished request.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._finish(sequence)
        return True

    def has_work(self) -> bool:
        """Some request is unfinished or some step is not committed."""
        return bool(self._sequences) or bool(self._in_flight)

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step, or None if nothing can run before another commit (or at all)."""
        plan: dict[Sequence, int] = {}
        num_preempted = len(self._preempted)
        self._plan_decodes(plan)
        num_decodes = len(plan)
        budget = self.config.max_num_batched_tokens - num_decodes
        self._plan_prefills(plan, budget, admit=len(self._preempted) == num_preempted)
        assert plan or self._in_flight or not self._sequences, f"{len(self._sequences)} requests, and none can move"
        return self._issue(plan) if plan else None

    def commit(
        self, step: ScheduledStep, tokens: Mapping[str, int], *, stopped: Collection[str] = ()
    ) -> list[TokenEvent]:
        """Take the tokens of the oldest step in flight.

        Args:
            tokens: request id -> token sampled from its chunk, for every chunk that samples; ids that ended while
                the step was in flight are ignored.
            stopped: ids whose text ends with this token, by a stop string.
        Returns:
            One event for each sequence that is still alive and sampled, in the step's order.
        """
        assert self._in_flight, f"step {step.index} is committed, but none is in flight"
        index, sampling = self._in_flight.popleft()
        assert index == step.index, f"step {step.index} is committed before step {index}"
        events = []
        for sequence in sampling:
            sequence.num_in_flight -= 1
            if sequence.finished:
                continue
            assert sequence.request_id in tokens, f"step {index} brought no token for {sequence.request_id}"
            token = tokens[sequence.request_id]
            sequence.num_outputs += 1
            reason = self._finish_reason(sequence, token, stopped)
            if reason is not None:
                self._finish(sequence)
            events.append(TokenEvent(sequence.request_id, token, reason))
        return events

    def restart(self, requests: Iterable[tuple[Request, int]]) -> None:
        """Forget every step, block and slot, and begin again with these unfinished requests.

        For when a step failed: what it wrote is missing or half done, and how far it got is not known.

        Args:
            requests: each with the number of tokens it was given, in order of arrival; those are recomputed.
        """
        self.num_preemptions += len(self._running)
        self.num_recomputed_tokens += sum(sequence.num_computed for sequence in self._running)
        self._reset()
        for request, num_outputs in requests:
            self.add(request)
            sequence = self._waiting[-1]
            sequence.num_outputs = num_outputs
            sequence.restart()

    def check_integrity(self) -> None:
        """Recount queues, pools and tokens in flight; an AssertionError names what differs."""
        check_queues(
            running=self._running,
            waiting=self._waiting,
            known=self._sequences.values(),
            in_flight=[sampling for _, sampling in self._in_flight],
        )
        assert len(self._running) <= self.config.max_running, f"{len(self._running)} sequences run"
        if self._blocks is not None:
            check_blocks(self._blocks, self._running)
        if self._slots is not None:
            self._slots.check_integrity({s.request_id: s.slot for s in self._running})

    def _plan_decodes(self, plan: dict[Sequence, int]) -> None:
        for sequence in tuple(self._running):
            if sequence.running and sequence.can_decode and self._grow(sequence, sequence.num_known, plan):
                plan[sequence] = 1

    def _plan_prefills(self, plan: dict[Sequence, int], budget: int, *, admit: bool) -> None:
        running = [s for s in self._running if s.is_prefilling and not self._is_stuck(s)]
        candidates = self._candidates() if admit else []
        served, shares = self._share(running, candidates, budget)
        while (fitting := self._count_fitting(served, shares)) is not None:
            candidates = candidates[:fitting]
            served, shares = self._share(running, candidates, budget)
        for sequence, share in sorted(zip(served, shares, strict=True), key=lambda pair: pair[0].arrival):
            if sequence.running:
                share = self._make_room(sequence, share, plan)
            elif sequence in candidates and self._waiting[0] is sequence:
                self._admit(sequence, share)
            else:
                continue  # an earlier arrival just preempted it, or what it must wait behind
            if share:
                plan[sequence] = share
                sequence.served_step = self._num_steps

    def _candidates(self) -> list[Sequence]:
        """The waiting sequences for which there are seats, in order."""
        candidates = []
        for sequence in islice(self._waiting, self.config.max_running - len(self._running)):
            if sequence.num_in_flight:
                break  # preempted with its last token still unknown; that comes with the next commit
            candidates.append(sequence)
        return candidates

    def _share(
        self, running: list[Sequence], candidates: list[Sequence], budget: int
    ) -> tuple[list[Sequence], list[int]]:
        """Choose who is served, and how many tokens each gets."""
        turns = [(s.served_step, s) for s in running]
        latest = -1
        for sequence in candidates:  # never before one that waits ahead of it
            latest = max(latest, sequence.served_step)
            turns.append((latest, sequence))
        turns.sort(key=lambda turn: turn[0])
        served: list[Sequence] = []
        left = budget
        for _, sequence in turns:
            least = min(sequence.prefill_remaining, self.config.prefill_quantum)
            if left == 0 or (served and least > left):
                break
            served.append(sequence)
            left -= min(least, left)
        return served, fair_shares([s.prefill_remaining for s in served], budget)

    def _count_fitting(self, served: list[Sequence], shares: list[int]) -> int | None:
        """How many of the served candidates can be admitted; None if all."""
        pool = self._blocks
        if pool is None:
            return None
        free = pool.num_free
        for sequence, share in zip(served, shares, strict=True):
            if sequence.running:
                free -= pool.blocks_for(sequence.num_computed + share) - len(sequence.block_ids)
        fitting = 0
        for sequence, share in zip(served, shares, strict=True):
            if sequence.running:
                continue
            needed = pool.blocks_for(sequence.prefill_target if sequence.preempted else share)
            alone = not self._running and fitting == 0
            if free - needed < (0 if alone else self.config.watermark_blocks):
                return fitting
            free -= pool.blocks_for(share)
            fitting += 1
        return None

    def _make_room(self, sequence: Sequence, share: int, plan: dict[Sequence, int]) -> int:
        """Give a running prefill blocks for up to ``share`` tokens; others lose theirs only if it gets nothing else."""
        pool = self._blocks
        if pool is None:
            return share
        if self._is_stuck(sequence):
            return 0
        self._grow(sequence, sequence.num_computed + 1, plan)
        most = (len(sequence.block_ids) + pool.num_free) * pool.block_size - sequence.num_computed
        share = min(share, most)
        grown = self._grow(sequence, sequence.num_computed + share, plan)
        assert grown, f"{sequence.request_id} was preempted for its own {share} tokens"
        return share

    def _is_stuck(self, sequence: Sequence) -> bool:
        """A running prefill that needs a block when none is free, and is the latest, so has nobody to take it from."""
        pool = self._blocks
        if pool is None or pool.num_free or self._running[-1] is not sequence:
            return False
        return sequence.num_computed == len(sequence.block_ids) * pool.block_size

    def _grow(self, sequence: Sequence, num_tokens: int, plan: dict[Sequence, int]) -> bool:
        """Make a sequence own blocks for ``num_tokens``, preempting the latest arrivals; False if that was itself."""
        pool = self._blocks
        if pool is None:
            return True
        missing = pool.blocks_for(num_tokens) - len(sequence.block_ids)
        if missing <= 0:
            return True
        while (blocks := pool.allocate(missing)) is None:
            victim = self._running[-1]
            plan.pop(victim, None)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_ids += tuple(blocks)
        return True

    def _admit(self, sequence: Sequence, share: int) -> None:
        self._waiting.popleft()
        if self._slots is not None:
            slot = self._slots.allocate()
            assert slot is not None, f"no slot for {sequence.request_id} with {len(self._running)} running"
            sequence.slot = slot
        if self._blocks is not None:
            blocks = self._blocks.allocate(self._blocks.blocks_for(share))
            assert blocks is not None, f"no blocks for {share} tokens, {self._blocks.num_free} are free"
            sequence.block_ids = tuple(blocks)
        sequence.running = True
        sequence.preempted = False
        self._running.append(sequence)

    def _issue(self, plan: dict[Sequence, int]) -> ScheduledStep:
        """Turn the plan, decodes first, into chunks and count it as done: the next step builds on it."""
        chunks = []
        sampling = []
        for sequence, length in plan.items():
            start = sequence.num_computed
            samples = start + length == sequence.num_known
            chunk = Chunk(
                request_id=sequence.request_id,
                start=start,
                length=length,
                block_ids=sequence.block_ids,
                slot=sequence.slot,
                is_decode=not sequence.is_prefilling,
                samples=samples,
            )
            chunks.append(chunk)
            sequence.num_computed += length
            if samples:
                sequence.num_in_flight += 1
                sampling.append(sequence)
        step = ScheduledStep(index=self._num_steps, chunks=tuple(chunks), preempted=tuple(self._preempted))
        self._preempted.clear()
        self._in_flight.append((step.index, tuple(sampling)))
        self._num_steps += 1
        return step

    def _finish_reason(self, sequence: Sequence, token: int, stopped: Collection[str]) -> FinishReason | None:
        request = sequence.request
        stops = token in request.stop_token_ids and sequence.num_outputs >= request.params.min_tokens
        if stops or sequence.request_id in stopped:
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.num_outputs >= sequence.max_tokens else None

    def _finish(self, sequence: Sequence) -> None:
        sequence.finished = True
        del self._sequences[sequence.request_id]
        if sequence.running:
            self._running.remove(sequence)
            self._free(sequence)
        else:
            self._waiting.remove(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self.num_recomputed_tokens += sequence.num_computed
        self._running.remove(sequence)
        self._free(sequence)
        sequence.preempted = True
        self._waiting.appendleft(sequence)
        self._preempted.append(sequence.request_id)

    def _free(self, sequence: Sequence) -> None:
        if self._blocks is not None:
            self._blocks.release(sequence.block_ids)
        if self._slots is not None:
            self._slots.release(sequence.slot)
        sequence.restart()
