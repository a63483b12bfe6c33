"""Continuous batching: which tokens of which sequences the next step runs, and where they live.

A step is planned (``schedule``) from counts alone and finished (``commit``) when its sampled tokens are known; more
steps may be planned before the first is committed. What is freed while a step is in flight may be handed out at once:
the device runs steps in order. What a step leaves in the prefix cache is entered there by ``remember``, best when the
device has its work, and else by whatever is called next.

Policy:
    1. Every decoding sequence gets its one token, in order of arrival.
    2. The rest of the budget, as far as the pacer allows beside decodes, is shared equally among prefilling sequences,
       running and newly admitted ones, at least ``prefill_quantum`` tokens each; if there are too many for that, the
       least recently served go first. So a sequence waits for steps by how many others there are, not how long.
    3. Admission is first come, first served: it needs a seat, a slot and the blocks of the first chunk, and leaves
       the watermark free. A preempted sequence comes back when all it had fits again, lest it be preempted at once.
       Those that wait for a prefix which another one computes let others by, whatever their number.
    4. When blocks run out, the latest arrived sequence loses everything it computed and goes back to the front of the
       queue. A prefill takes blocks that way only if it cannot move at all. The earliest running sequence is never
       preempted and each fits the pool alone, so there is always progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Listing
from itertools import count

from sidestream.cache.prefix_stats import PrefixStats
from sidestream.core.batch import Chunk, ScheduledStep, SlotCopy
from sidestream.core.outputs import TokenEvent
from sidestream.core.request import Request
from sidestream.errors import RequestError
from sidestream.scheduler.admission import AdmissionRoom
from sidestream.scheduler.config import SchedulerConfig, check_request
from sidestream.scheduler.fair_share import shares_by_turn, within_limit
from sidestream.scheduler.integrity import check_queues
from sidestream.scheduler.prefill_pacer import PrefillPacer
from sidestream.scheduler.prefixes import Prefixes
from sidestream.scheduler.running import Losses, Plan, Running
from sidestream.scheduler.sequence import Sequence, by_arrival


class Scheduler:
    """Plans steps and owns blocks and slots.

    Args:
        pacer: keeps prompts from stalling decodes; without one, plans are a function of the requests alone.

    Attributes:
        num_paced_steps: steps that would have prefilled more without a pacer.
        prefix_stats: what the prefix cache did.
    """

    def __init__(self, config: SchedulerConfig, *, pacer: PrefillPacer | None = None) -> None:
        self.config = config
        self._pacer = pacer
        self.num_paced_steps = 0
        self._losses = Losses()
        self.prefix_stats = PrefixStats()
        self._arrivals = count()
        self._num_steps = 0
        self._reset()

    def _reset(self) -> None:
        config = self.config
        self._prefixes = Prefixes(config, self.prefix_stats)
        self._blocks = self._prefixes.blocks
        self._sequences: dict[str, Sequence] = {}
        self._waiting = self._prefixes.waiting
        self._running = Running(config, self._prefixes, self._losses)
        self._in_flight: deque[tuple[int, tuple[Sequence, ...]]] = deque()  # step index, its sampling sequences

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
        return self._running.num_free_slots

    @property
    def num_preemptions(self) -> int:
        """Times a sequence lost its memory."""
        return self._losses.preemptions

    @property
    def num_recomputed_tokens(self) -> int:
        """Computed positions thrown away by that."""
        return self._losses.recomputed_tokens

    def room(self, num_prompt_tokens: int) -> int:
        """Most tokens that can be generated after such a prompt."""
        return self.config.room(num_prompt_tokens)

    def add(self, request: Request) -> None:
        """Queue a request; if it fails, by an interrupt for example, nothing has changed, unless what the last planned
        step computes was still to be entered: call ``remember`` first, as an engine's step does.

        Raises:
            RequestError: the prompt is empty or too long for ``max_model_len``, or the id is in use.
            CapacityError: the block pool could never hold the prompt.
        """
        self.remember()
        self._enter(request)

    def _enter(self, request: Request, generated: Listing[int] = ()) -> Sequence:
        name, prompt = request.request_id, len(request.prompt_token_ids)
        if name in self._sequences:
            raise RequestError(f"request id {name!r} is in use by an unfinished request; choose another")
        check_request(request, self.config)
        most, served = min(request.max_tokens, self.config.room(prompt)), self._num_steps - 1
        sequence = Sequence(request, arrival=next(self._arrivals), max_tokens=most, served_step=served)
        try:
            self._prefixes.open(sequence, generated)
            self._waiting.add(sequence)
            self._sequences[name] = sequence
        except BaseException:  # an interrupt may come anywhere
            self._sequences.pop(name, None)
            self._waiting.withdraw(sequence)
            self._prefixes.withdraw(self._sequences.values())
            raise
        return sequence

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is: its memory is free at once, steps in flight drop its result.

        Returns:
            Whether there was such an unfinished request.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self.remember()
        self._finish(sequence)
        return True

    def has_work(self) -> bool:
        """Some request is unfinished or some step is not committed."""
        return bool(self._sequences) or bool(self._in_flight)

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step, or None if nothing can run before another commit (or at all)."""
        self.remember()
        plan: Plan = {}
        num_preempted = self._running.num_preempted
        self._plan_decodes(plan)
        admit = self._running.num_preempted == num_preempted
        candidates = self._prefixes.candidates(self._running.seats if admit else 0)
        budget = self.config.max_num_batched_tokens - len(plan)
        limit = min(budget, self._pace(len(plan), candidates))
        self._plan_prefills(plan, limit, candidates)
        self._prefixes.dismiss(candidates)
        if limit < budget:
            self.num_paced_steps += limit == sum(length for s, length in plan.items() if s.is_prefilling)
        assert plan or self._in_flight or not self._sequences, f"{len(self._sequences)} requests, and none can move"
        return self._issue(plan) if plan else None

    def remember(self) -> None:
        """Enter what the last planned step computes into the prefix cache, where others find it."""
        self._prefixes.publish()

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
        self.remember()
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
            self._prefixes.learn(sequence, token)
            reason = sequence.finish_reason(token, stopped=sequence.request_id in stopped)
            if reason is not None:
                self._finish(sequence)
            events.append(TokenEvent(sequence.request_id, token, reason))
        return events

    def restart(self, requests: Iterable[tuple[Request, Listing[int]]]) -> None:
        """Forget every step, block and slot, and begin again with these unfinished requests.

        For when a step failed: what it wrote is missing or half done, and how far it got is not known.

        Args:
            requests: each with the tokens it was given, in order of arrival; those are recomputed.
        """
        self._running.count_all_lost()
        self._reset()
        for request, generated in requests:
            sequence = self._enter(request, generated)
            sequence.num_outputs = len(generated)
            sequence.restart()

    def is_dead_block(self, block: int) -> bool:
        """Whether nobody owns a block, or could find what it holds."""
        return self._blocks is not None and not self._blocks.holds_content(block)

    def check_integrity(self) -> None:
        """Recount queues, pools and tokens in flight; an AssertionError names what differs."""
        self.remember()
        check_queues(
            running=list(self._running),
            waiting=sorted(self._waiting, key=by_arrival),
            known=self._sequences.values(),
            in_flight=[sampling for _, sampling in self._in_flight],
        )
        self._running.check_integrity()
        self._prefixes.check_integrity(self._sequences.values())

    def _plan_decodes(self, plan: Plan) -> None:
        for sequence in tuple(self._running):
            if sequence.running and sequence.can_decode and self._running.grow(sequence, sequence.num_known, plan):
                plan[sequence] = 1

    def _pace(self, num_decodes: int, candidates: list[Sequence]) -> int:
        """Prefill tokens that the pacer allows this step."""
        if self._pacer is None:
            return self.config.max_num_batched_tokens
        prompts = [*(sequence for sequence in self._running if sequence.is_prefilling), *candidates]
        num_prompts = len(prompts) + len(self._waiting) if prompts else 0
        return self._pacer.budget(num_decodes, num_prompts, longest=max((s.num_known for s in prompts), default=0))

    def _plan_prefills(self, plan: Plan, budget: int, candidates: list[Sequence]) -> None:
        running = [s for s in self._running if s.is_prefilling and not self._running.is_stuck(s)]
        served, shares = self._share(running, candidates, budget)
        room = AdmissionRoom(blocks=self._blocks, watermark=self.config.watermark_blocks, alone=not self._running)
        while (fitting := room.count_fitting(served, shares)) is not None:
            candidates = candidates[:fitting]
            served, shares = self._share(running, candidates, budget)
        num_preempted, next_in_line = self._running.num_preempted, deque(candidates)
        for sequence, share in sorted(zip(served, shares, strict=True), key=lambda pair: pair[0].arrival):
            if sequence.running:
                share = self._running.make_room(sequence, share, plan)
            elif self._running.num_preempted > num_preempted or not next_in_line or next_in_line[0] is not sequence:
                continue  # an earlier arrival just preempted it, or what it must wait behind
            elif self._running.admit(sequence, share):
                next_in_line.popleft()
            else:
                next_in_line.clear()
                continue
            if share:
                plan[sequence] = share
                sequence.served_step = self._num_steps

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
        ordered = [sequence for _, sequence in turns]
        if (limit := self.config.max_prefill_context) is not None:
            sizes = [sequence.prefill_start // self.config.block_size for sequence in ordered]
            fitting = within_limit(sizes, ahead=[s.running for s in ordered], limit=limit)
            ordered = [ordered[i] for i in fitting]
        needs = [min(sequence.prefill_target - sequence.prefill_start, budget) for sequence in ordered]
        shares = shares_by_turn(needs, budget, quantum=self.config.prefill_quantum)
        return ordered[: len(shares)], shares

    def _issue(self, plan: Plan) -> ScheduledStep:
        """Turn the plan, decodes first, into chunks and count it as done: the next step builds on it."""
        chunks, sampling = [], []
        restores, snapshots = list[SlotCopy](), list[SlotCopy]()
        self._prefixes.begin_step()
        for sequence, length in plan.items():
            start, decode = sequence.num_computed, not sequence.is_prefilling
            samples = start + length == sequence.num_known
            restores += self._prefixes.restore(sequence)
            sequence.num_computed += length
            splits, copies = self._prefixes.computed(sequence, decode=decode)
            snapshots += copies
            chunks.append(
                Chunk(
                    request_id=sequence.request_id,
                    start=start,
                    length=length,
                    block_ids=sequence.block_ids,
                    slot=sequence.slot,
                    is_decode=decode,
                    samples=samples,
                    splits=splits,
                )
            )
            if samples:
                sequence.num_in_flight += 1
                sampling.append(sequence)
        news = self._running.take_news()
        step = ScheduledStep(self._num_steps, tuple(chunks), *news, tuple(restores), tuple(snapshots))
        self._in_flight.append((step.index, tuple(sampling)))
        self._num_steps += 1
        return step

    def _finish(self, sequence: Sequence) -> None:
        sequence.finished = True
        del self._sequences[sequence.request_id]
        if sequence.running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._prefixes.close(sequence)
