"""The prefix cache as the scheduler uses it: what each sequence takes over, waits for and leaves to others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Listing

from sidestream.cache.block_pool import BlockPool
from sidestream.cache.cached_sequence import Hit
from sidestream.cache.prefix_cache import PrefixCache
from sidestream.cache.prefix_stats import PrefixStats
from sidestream.cache.prefix_tree import PrefixNode
from sidestream.core.batch import Admission, SlotCopy, Split
from sidestream.core.outputs import CacheReason
from sidestream.scheduler.config import SchedulerConfig
from sidestream.scheduler.sequence import NO_HIT, Sequence
from sidestream.scheduler.waiting_line import WaitingLine


class Prefixes:
    """The block pool, with a prefix cache over it or without; without one nothing is found and nothing is kept.

    Attributes:
        blocks: None where no layer keeps blocks.
        waiting: who is not admitted yet.
    """

    def __init__(self, config: SchedulerConfig, stats: PrefixStats) -> None:
        self._config = config
        self._stats = stats
        self._cache: PrefixCache | None = None
        self.blocks: BlockPool | None = None
        self.waiting = WaitingLine(block_size=config.block_size, patience=config.shared_prefix_wait, stats=stats)
        if config.prefix_caching:
            self._cache = PrefixCache(
                config.num_blocks,
                config.block_size,
                salt=config.prefix_salt,
                snapshots=(config.num_slots, config.num_snapshots) if config.needs_snapshots else None,
                snapshot_interval=config.snapshot_interval,
                first_guess=config.first_guess,
                stats=stats,
            )
            self.blocks = self._cache.blocks
        elif config.uses_blocks:
            self.blocks = BlockPool(config.num_blocks, config.block_size)

    def open(self, sequence: Sequence, generated: Listing[int]) -> None:
        """A sequence arrived, with tokens it generated before, if any."""
        if self._cache is not None:
            request = sequence.request
            prompt = request.prompt_token_ids
            tokens = (*prompt, *generated) if generated else prompt
            sequence.prefix = self._cache.open(tokens, num_prompt=len(prompt), salt=request.cache_salt)

    def withdraw(self, others: Collection[Sequence]) -> None:
        """``open`` was interrupted, or what came behind it: the cache knows these alone again."""
        if self._cache is not None:
            self._cache.withdraw([sequence.prefix for sequence in others if sequence.prefix is not None])

    def candidates(self, seats: int) -> list[Sequence]:
        """Take the waiting sequences for which there are seats out of the line, in order, but for those that better
        wait for a prefix.

        Whoever is looked at in vain waits apart from then on, until what it waits for has changed. So there are no
        more looks in all than sequences that come, groups that wake, and candidates.
        """
        line, found = self.waiting, list[Sequence]()
        if seats:
            line.next_turn()
        while len(found) < seats and (sequence := line.first()) is not None:
            if sequence.num_in_flight:
                break  # preempted with its last token still unknown; that comes with the next commit
            node = line.awaited(sequence)
            if node is None or self._cache is None or not self._cache.is_coming(node):
                node = self._prepare(sequence)
            if node is not None:
                line.park(sequence, node)
            else:
                line.remove(sequence)
                found.append(sequence)
        return found

    def _prepare(self, sequence: Sequence) -> PrefixNode | None:
        """Look up what a waiting sequence could take over, or the block that it should rather wait for."""
        cache, prefix = self._cache, sequence.prefix
        if cache is None or prefix is None:
            return None
        known, patience = sequence.prefill_target, self._config.shared_prefix_wait
        sequence.hit = found = cache.find(prefix, known)
        if sequence.request.params.prompt_logprobs is not None:
            sequence.hit = Hit(num_found=found.num_found, reason=CacheReason.PROMPT_LOGPROBS)
        elif sequence.waited <= patience and (node := cache.worth_waiting(prefix, found, known)) is not None:
            if sequence.waited < patience:
                sequence.hit = NO_HIT
                return node
            sequence.waited += 1
            self._stats.gave_up += 1
        cache.claim(prefix, sequence.hit, known)
        return None

    def dismiss(self, candidates: Iterable[Sequence]) -> None:
        """Those that were not admitted in this step wait on. Who waits for them does so too: they are next."""
        for sequence in candidates:
            if not sequence.running:
                self.waiting.add(sequence)
                sequence.hit = NO_HIT
                if sequence.prefix is not None:
                    sequence.prefix.active = False
                    sequence.prefix.num_computed = 0

    def holds(self, sequence: Sequence) -> bool:
        """What was found for a candidate is still there."""
        if self._cache is None or sequence.prefix is None or not sequence.hit.num_tokens:
            return True
        found = self._cache.find(sequence.prefix, sequence.prefill_target)
        return (found.blocks, found.snapshot) == (sequence.hit.blocks, sequence.hit.snapshot)

    def admit(self, sequence: Sequence) -> Admission:
        """It begins to run with what it takes over."""
        hit, cache, stats = sequence.hit, self._cache, self._stats
        if cache is not None and sequence.prefix is not None:
            cache.admit(sequence.prefix, hit)
            sequence.block_ids = hit.blocks
            sequence.num_computed = hit.num_tokens
            sequence.restore_from = hit.snapshot
            self.waiting.wake(sequence.prefix, hit.num_tokens)
            stats.requests += 1
            stats.hits += hit.num_tokens > 0
            stats.known_tokens += sequence.prefill_target
            stats.cached_tokens += hit.num_tokens
            stats.reasons[hit.reason] += 1
            if unused := hit.num_found * self._config.block_size - hit.num_tokens:
                stats.unused_tokens[hit.reason] += unused
        return Admission(sequence.request_id, hit.num_tokens, hit.reason)

    def restore(self, sequence: Sequence) -> list[SlotCopy]:
        """What must be copied before its first chunk."""
        if sequence.restore_from is None:
            return []
        copy = SlotCopy(sequence.restore_from, sequence.slot)
        sequence.restore_from = None
        self._stats.snapshots_restored += 1
        return [copy]

    def begin_step(self) -> None:
        """The chunks of another step are planned."""
        if self._cache is not None:
            self._cache.begin_step()

    def computed(self, sequence: Sequence, *, decode: bool) -> tuple[tuple[Split, ...], list[SlotCopy]]:
        """A chunk was planned up to ``num_computed``; the states to be kept within it, and what is copied after it."""
        if self._cache is None or sequence.prefix is None:
            return (), []
        end = sequence.num_computed
        splits = self._cache.computed(sequence.prefix, end, sequence.block_ids, decode=decode)
        self.waiting.wake(sequence.prefix, end)
        last = splits.pop() if splits and splits[-1].position == end else None
        return tuple(splits), [] if last is None else [SlotCopy(sequence.slot, last.slot)]

    def publish(self) -> None:
        """Let others find what the last planned step computes."""
        if self._cache is not None:
            self._cache.publish()

    def learn(self, sequence: Sequence, token_id: int) -> None:
        """A token of it was committed."""
        if self._cache is not None and sequence.prefix is not None:
            self._cache.learn(sequence.prefix, token_id, sequence.block_ids)

    def lose(self, sequence: Sequence) -> None:
        """It gives up its memory."""
        if self._cache is not None and sequence.prefix is not None:
            self._cache.lose(sequence.prefix)
            self.waiting.wake(sequence.prefix)

    def close(self, sequence: Sequence) -> None:
        """It is finished."""
        if self._cache is not None and sequence.prefix is not None:
            self._cache.close(sequence.prefix)
            self.waiting.wake(sequence.prefix)

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Recount the cache and who waits for it; an AssertionError names what differs."""
        self.waiting.check_integrity({s.prefix for s in sequences if s.prefix is not None})
        if self._cache is not None:
            self._cache.check_integrity([s.prefix for s in sequences if s.prefix is not None])
            for sequence in sequences:
                assert sequence.prefix is not None, f"{sequence.request_id} is unknown to the prefix cache"
                assert sequence.prefix.active == sequence.running, f"{sequence.request_id} claims what it does not run"
                assert sequence.prefix.num_computed == sequence.num_computed, (
                    f"{sequence.request_id} has computed {sequence.num_computed} tokens, the prefix cache counts "
                    f"{sequence.prefix.num_computed}"
                )
