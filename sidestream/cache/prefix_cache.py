"""Prefix cache: which blocks and which state a sequence can take over from others, and what others will want of it.

A sequence of a model without linear attention can continue behind every cached block. One with linear attention needs
the state at that place too: a snapshot, a copy of its slot at a block boundary. A snapshot costs as much memory as
thousands of tokens of KV, so it is taken where it promises to be of use:

- at the last full block of what a sequence prefills;
- where prefixes part or end, as the tree of all cached and unfinished prefixes shows;
- every ``snapshot_interval`` blocks, if asked for;
- at the last block boundary of what was generated, for the next turn of a conversation: each replaces the one before;
- behind the first 128, 256, 512 and so on tokens, on the guess that others begin alike and part somewhere behind it.
  That is as good for all prompts, so whoever shares 128 tokens or more takes over more than half of them.

What a planned step computes counts as cached from then on: steps run in order, so whoever is planned later finds it.
A prompt's part of that is entered by ``publish``, a while later, so that the device need not wait for it. Before that
it is hashed as far as it goes with others, and a block more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from sidestream.cache.block_hashes import BlockHashes, chain_root
from sidestream.cache.block_pool import BlockPool
from sidestream.cache.cached_sequence import CachedSequence, Hit
from sidestream.cache.prefix_stats import PrefixStats
from sidestream.cache.prefix_tree import PrefixNode, PrefixTree, Producer
from sidestream.cache.snapshots import SnapshotPool
from sidestream.core.batch import Split
from sidestream.core.outputs import CacheReason

FIRST_GUESS_TOKENS = 128
"""Prompts that have less in common are cheap to compute."""
ROOTS = 1024
"""Starts of chains that are kept, one for each salt."""
NO_BLOCK = Hit(reason=CacheReason.SHORT)
NOTHING = Hit()
"""Hits of a sequence without a full block, and of one whose first nobody computed: what most prompts ask for."""


class PrefixCache:
    """Finds, publishes and evicts.

    Args:
        num_blocks, block_size: of the block pool.
        salt: what the content depends on beside the tokens: the model and its row format.
        snapshots: first slot for them and how many; None for a model without linear attention.
        snapshot_interval: blocks between snapshots within a prompt; None takes none there.
        first_guess: tokens of the shortest prefix that is guessed to be shared.

    Attributes:
        blocks: the pool; whoever allocates from it evicts.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        salt: bytes,
        snapshots: tuple[int, int] | None,
        snapshot_interval: int | None,
        stats: PrefixStats,
        first_guess: int = FIRST_GUESS_TOKENS,
    ) -> None:
        self.blocks = BlockPool(num_blocks, block_size, on_evict=self._forget_block)
        self.snapshots = None if snapshots is None else SnapshotPool(*snapshots, on_evict=self._forget_snapshot)
        self.tree = PrefixTree()
        self.stats = stats
        self._unpublished: list[tuple[CachedSequence, Sequence[int]]] = []
        self._root = lru_cache(ROOTS)(lambda tenant: chain_root(salt, tenant.encode(errors="surrogatepass")))
        self._snapshot_interval = snapshot_interval
        least = -(-first_guess // block_size)
        guess = self.snapshots is not None and self.snapshots.most_guesses > 0
        self._guesses = [least << power for power in range(32)] if guess else []

    def open(self, token_ids: Sequence[int], *, num_prompt: int, salt: str) -> CachedSequence:
        """Enter a sequence with its known tokens; marks where it parts from what is there.

        Args:
            salt: sequences of different salts share nothing.
        """
        self._catch_up()
        size = self.blocks.block_size
        sequence = CachedSequence(BlockHashes(self._root(salt), size, token_ids))
        known = self.tree.enter(sequence)
        parting = min(known, (num_prompt - 1) // size)
        if parting and self.snapshots is not None:
            sequence.path[parting - 1].wanted = True
        return sequence

    def find(self, sequence: CachedSequence, num_known: int) -> Hit:
        """What a sequence that is not running could take over now; changes nothing.

        Args:
            num_known: its tokens.
        """
        self._catch_up()
        path, limit = sequence.path, (num_known - 1) // self.blocks.block_size
        if not path:
            return NO_BLOCK
        if path[0].block is None:
            return NOTHING
        blocks: list[int] = []
        place = 0
        for node in path:
            if node.block is None:
                break
            blocks.append(node.block)
            if node.snapshot is not None and len(blocks) <= limit:
                place = len(blocks)
        found = len(blocks)
        reason = CacheReason.NOTHING_LONGER if found <= limit else CacheReason.LAST_TOKEN
        if self.snapshots is None:
            place = min(found, limit)
        elif place < min(found, limit):
            reason = CacheReason.NO_SNAPSHOT
        snapshot = path[place - 1].snapshot if place else None
        return Hit(place * self.blocks.block_size, tuple(blocks[:place]), snapshot, found, reason)

    def worth_waiting(self, sequence: CachedSequence, hit: Hit, num_known: int) -> PrefixNode | None:
        """The last block of its prefix that a running sequence will compute, and leave what it takes to continue there;
        None if there is none."""
        self._catch_up()
        size = self.blocks.block_size
        last = None
        for node in sequence.path[hit.num_tokens // size : (num_known - 1) // size]:
            if self._is_coming(node):
                last = node
            elif node.block is None and not self._computes(node):
                break
        return last

    def is_coming(self, node: PrefixNode) -> bool:
        """A running sequence will compute a block, and leave what it takes to continue there."""
        self._catch_up()
        return self._is_coming(node)

    def _is_coming(self, node: PrefixNode) -> bool:
        producer = self._computes(node)
        if producer is None:
            return False
        return node.block is None if self.snapshots is None else self._wants(producer, node)

    def _computes(self, node: PrefixNode) -> Producer | None:
        """Who runs and has a block before it."""
        producer, end = node.producer, node.depth * self.blocks.block_size
        return producer if producer is not None and producer.active and producer.num_computed < end else None

    def claim(self, sequence: CachedSequence, hit: Hit, num_known: int) -> None:
        """It is about to compute what it does not take over, so that others may wait for that."""
        sequence.last_full = num_known // self.blocks.block_size
        sequence.active = True
        sequence.num_computed = hit.num_tokens
        for node in sequence.path[hit.num_tokens // self.blocks.block_size :]:
            node.producer = sequence

    def admit(self, sequence: CachedSequence, hit: Hit) -> None:
        """It was claimed and runs now; it shares the hit's blocks."""
        self.blocks.share(hit.blocks)
        if hit.snapshot is not None:
            assert self.snapshots is not None
            self.snapshots.touch(hit.snapshot)
        sequence.num_published = len(hit.blocks)

    def begin_step(self) -> None:
        """What ``computed`` says from now on is of another step."""
        self._require_published()
        if self.snapshots is not None:
            self.snapshots.begin_step()

    def computed(self, sequence: CachedSequence, end: int, block_ids: Sequence[int], *, decode: bool) -> list[Split]:
        """A step was planned that computes positions up to ``end``. ``publish`` must be called once for all sequences
        of the step, of which decodes come first, before the cache or its pool are asked for anything else.

        Args:
            block_ids: of the sequence; those that are there stay as they are until then.
        Returns:
            States that the step must keep, in order; the last may be that of ``end``.
        """
        start, sequence.num_computed = sequence.num_computed, end
        size = self.blocks.block_size
        if not decode:
            self._unpublished.append((sequence, block_ids))
            return self._take(sequence, self._wanted(sequence, start // size, end // size))
        self._publish(sequence, block_ids)
        if self.snapshots is None:
            return []
        if end % size:
            return []
        depth = end // size
        node = sequence.path[depth - 1] if depth <= len(sequence.path) else None
        if node is not None and node.snapshot is not None:
            self.snapshots.touch(node.snapshot)
            return []
        if not self.snapshots.num_free:
            self._drop_generated(sequence)
        slot = self.snapshots.take()
        self._count_taken(slot)
        if slot is None:
            return []
        if node is None:
            sequence.pending.append((depth, slot))
        else:
            self._attach(sequence, node, slot)
        return [Split(end, slot)]

    def learn(self, sequence: CachedSequence, token_id: int, block_ids: Sequence[int]) -> None:
        """A generated token became known."""
        self._catch_up()
        if sequence.hashes.append(token_id):
            self.tree.extend(sequence, sequence.hashes.num_full)
        self._publish(sequence, block_ids)

    def publish(self) -> None:
        """Let others find what the step computes of prompts, and nobody what it overwrites."""
        self.blocks.settle()
        for sequence, block_ids in self._unpublished:
            self._publish(sequence, block_ids)
        self._unpublished.clear()

    def _catch_up(self) -> None:
        """Blocks that were handed out do not count as cached any more; whoever looks at that calls this first."""
        self._require_published()
        self.blocks.settle()

    def _require_published(self) -> None:
        assert not self._unpublished, f"what a step computes of {len(self._unpublished)} prompts is not published"

    def _publish(self, sequence: CachedSequence, block_ids: Sequence[int]) -> None:
        """Let others find the full blocks that are computed and known, and the states behind them."""
        full = min(sequence.num_computed // self.blocks.block_size, sequence.hashes.num_full)
        if sequence.num_published >= full:
            return
        self.tree.extend(sequence, full)
        publish, done = self.blocks.publish, sequence.num_published
        for block, node in zip(block_ids[done:full], sequence.path[done:full], strict=True):
            node.block = found = publish(block, node.content)
            if node.snapshot is not None:
                self.blocks.urgent.add(found)
        sequence.num_published = full
        for depth, slot in sequence.unnamed:
            assert self.snapshots is not None
            node = sequence.path[depth - 1]
            self.snapshots.name(slot, node.content)
            self._set_snapshot(node, slot)
        sequence.unnamed.clear()
        while sequence.pending and sequence.pending[0][0] <= full:
            depth, slot = sequence.pending.pop(0)
            self._attach(sequence, sequence.path[depth - 1], slot)

    def lose(self, sequence: CachedSequence) -> None:
        """It does not run any more; what it published stays."""
        self._catch_up()
        sequence.active = False
        sequence.num_computed = sequence.num_published = 0
        sequence.generated = None
        for _, slot in sequence.pending:
            assert self.snapshots is not None
            self.snapshots.drop(slot)
        sequence.pending.clear()

    def close(self, sequence: CachedSequence) -> None:
        """It is finished."""
        self.lose(sequence)
        self.tree.leave(sequence)

    def withdraw(self, others: Collection[CachedSequence]) -> None:
        """``open`` was interrupted: make it undone, wherever it was.

        Args:
            others: all that are open beside that one.
        """
        self.tree.rebuild(others)

    def check_integrity(self, sequences: Collection[CachedSequence]) -> None:
        """Recount tree and snapshots; an AssertionError names what differs."""
        self._catch_up()
        self.tree.check_integrity(sequences)
        for node in self.tree.nodes.values():
            assert self.blocks.lookup(node.content) == node.block, (
                f"the pool holds {node.content.hex()} in {self.blocks.lookup(node.content)}, the tree in {node.block}"
            )
        if self.snapshots is not None:
            taken = [slot for sequence in sequences for _, slot in sequence.pending]
            kept = [(n.snapshot, n.content) for n in self.tree.nodes.values() if n.snapshot is not None]
            urgent = {n.block for n in self.tree.nodes.values() if n.snapshot is not None}
            assert urgent <= self.blocks.urgent, f"blocks {urgent - self.blocks.urgent} have states behind them"
            self.snapshots.check_integrity(taken=taken, kept=kept)

    def _forget_block(self, block: int, content: bytes) -> None:
        """A published block is handed out for other content; a snapshot behind it is of no use without it."""
        node = self.tree.nodes[content]
        assert node.block == block, f"block {block} is evicted, its content was in {node.block}"
        node.block = None
        if node.snapshot is not None:
            assert self.snapshots is not None
            self.snapshots.drop(node.snapshot)
            node.snapshot = None
            self.stats.snapshots_evicted += 1
        self.stats.blocks_evicted += 1
        if not node.children and not node.ends:
            self.tree.prune(node)

    def _forget_snapshot(self, slot: int, content: bytes) -> None:
        """A snapshot gives way to another; its block stays."""
        node = self.tree.nodes[content]
        assert node.snapshot == slot, f"snapshot {slot} is evicted, its content was in {node.snapshot}"
        self._clear_snapshot(node)
        self.stats.snapshots_evicted += 1

    def _set_snapshot(self, node: PrefixNode, slot: int) -> None:
        """It stands behind a cached block: when that is handed out, the slot is free at once."""
        assert node.block is not None, f"a state behind block {node.depth}, which is not cached"
        node.snapshot = slot
        self.blocks.urgent.add(node.block)

    def _clear_snapshot(self, node: PrefixNode) -> None:
        node.snapshot = None
        if node.block is not None:
            self.blocks.urgent.discard(node.block)

    def _wants(self, sequence: Producer, node: PrefixNode) -> bool:
        """This sequence should leave a snapshot there when it comes by."""
        if node.snapshot is not None or self.snapshots is None or not self.snapshots.count:
            return False
        every, depth = self._snapshot_interval, node.depth
        asked = node.wanted or depth == sequence.last_full or (every is not None and depth % every == 0)
        return asked or depth in self._guesses

    def _wanted(self, sequence: CachedSequence, first: int, last: int) -> dict[int, bool]:
        """Behind how many of its blocks, more than ``first`` and up to ``last``, it should leave a snapshot, in order;
        and whether that is a guess: nobody will want it, for all that is known."""
        if self.snapshots is None or not self.snapshots.count:
            return {}
        path, every = sequence.path, self._snapshot_interval
        last = min(last, sequence.hashes.num_full)
        asked = {node.depth for node in path[first:last] if node.wanted}
        if first < sequence.last_full <= last:
            asked.add(sequence.last_full)
        if every is not None:
            asked.update(range(first // every * every + every, last + 1, every))
        guesses = self._guesses[bisect_right(self._guesses, first) : bisect_right(self._guesses, last)]
        return {
            depth: depth not in asked
            for depth in sorted(asked.union(guesses))
            if depth > len(path) or path[depth - 1].snapshot is None
        }

    def _take(self, sequence: CachedSequence, wanted: Mapping[int, bool]) -> list[Split]:
        """Slots for the states behind so many blocks of a prompt, kept from now on. Where they do not suffice, the
        first states give way to later ones that somebody will want."""
        pool, path, taken = self.snapshots, sequence.path, sequence.unnamed
        if pool is None:
            return []
        for depth, guess in wanted.items():
            slot = pool.take(guess=guess)
            if not guess or slot is not None:
                self._count_taken(slot)
            if slot is None and taken and not guess:
                pool.drop(taken.pop(0)[1])
                slot = pool.take()
            if slot is not None:
                pool.keep(slot, guess=guess)
                self.stats.snapshots_guessed += guess
                taken.append((depth, slot))
        for depth, slot in taken:
            if depth <= len(path):
                self.blocks.settle()
                path[depth - 1].snapshot = slot  # another prompt of the same step may pass there
        return [Split(depth * self.blocks.block_size, slot) for depth, slot in taken]

    def _count_taken(self, slot: int | None) -> None:
        self.stats.snapshots_taken += slot is not None
        self.stats.snapshots_failed += slot is None

    def _attach(self, sequence: CachedSequence, node: PrefixNode, slot: int) -> None:
        """Keep a snapshot of generated tokens unless there is one; the one before that nobody wants gives way to it."""
        assert self.snapshots is not None
        if node.snapshot is not None or node.block is None:
            self.snapshots.drop(slot)
            return
        self.snapshots.keep(slot, node.content)
        self._set_snapshot(node, slot)
        self._drop_generated(sequence)
        sequence.generated = node

    def _drop_generated(self, sequence: CachedSequence) -> None:
        """The sequence has a later snapshot of what it generated, and nobody else asked for this one."""
        node, sequence.generated = sequence.generated, None
        if node is not None and node.snapshot is not None and not node.wanted:
            assert self.snapshots is not None
            self.snapshots.drop(node.snapshot)
            self._clear_snapshot(node)
