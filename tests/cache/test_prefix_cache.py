"""The prefix cache against a plain model of it, and what each of its parts promises."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from sidestream.cache.block_hashes import BlockHashes, block_hashes, chain_root
from sidestream.cache.cached_sequence import CachedSequence
from sidestream.cache.prefix_cache import PrefixCache
from sidestream.cache.prefix_stats import PrefixStats
from sidestream.cache.snapshots import SnapshotPool
from sidestream.core.batch import Split
from sidestream.core.outputs import CacheReason
from tests.cache.plain_prefix_cache import PlainBlock, PlainPrefixCache, PlainSequence

SIZE, FIRST = 2, 5


def make_cache(
    num_blocks: int, *, snapshots: int | None = None, every: int | None = None, guess: int = 128
) -> PrefixCache:
    return PrefixCache(
        num_blocks,
        SIZE,
        salt=b"model",
        snapshots=None if snapshots is None else (FIRST, snapshots),
        snapshot_interval=every,
        first_guess=guess,
        stats=PrefixStats(),
    )


@dataclass
class Pair:
    """The same sequence in the cache and in the model. ``unread``: tokens computed whose value is not known yet."""

    real: CachedSequence
    plain: PlainSequence
    blocks: list[int] = field(default_factory=list)
    running: bool = False
    unread: list[int] = field(default_factory=list)


class Both:
    """Does everything twice, and compares all that can be seen."""

    def __init__(
        self,
        rng: random.Random,
        *,
        blocks: int,
        snapshots: int | None,
        every: int | None,
        guess: int,
        together: int = 1,
    ) -> None:
        self.rng = rng
        self.together = together
        self.real = make_cache(blocks + 1, snapshots=snapshots, every=every, guess=guess)
        self.plain = PlainPrefixCache(blocks, SIZE, snapshots=snapshots, every=every, guess=guess)
        self.pairs: list[Pair] = []
        self.strangers: list[tuple[list[int], list[PlainBlock]]] = []
        self.hits = self.waits = self.shared_steps = 0
        self.stems = [[rng.randrange(3) for _ in range(14)] for _ in range(3)]

    def submit(self) -> None:
        stem = self.rng.choice(self.stems)
        tokens = stem[: self.rng.randrange(1, 15)] + [
            self.rng.randrange(3) for _ in range(self.rng.choice((0, 0, 1, 3)))
        ]
        real = self.real.open(tokens, num_prompt=len(tokens), salt="")
        self.pairs.append(Pair(real, self.plain.open(tokens)))

    def admit(self) -> None:
        for pair in self.pick(running=False):
            hit = self.real.find(pair.real, len(pair.plain.tokens))
            assert hit.num_tokens == self.plain.find(pair.plain)
            node = self.real.worth_waiting(pair.real, hit, len(pair.plain.tokens))
            assert (0 if node is None else node.depth * SIZE) == self.plain.worth_waiting(pair.plain)
            assert node is None or (self.real.is_coming(node) and pair.real.path[node.depth - 1] is node)
            self.waits += node is not None
            assert (hit.snapshot is not None) == (hit.num_tokens > 0 and self.real.snapshots is not None)
            self.hits += hit.num_tokens > 0
            self.real.claim(pair.real, hit, len(pair.plain.tokens))
            self.real.admit(pair.real, hit)
            self.plain.admit(pair.plain)
            pair.blocks, pair.running = list(hit.blocks), True

    def compute(self) -> None:
        """A step of one sequence, or more where they go together, decodes first."""
        chunks: list[tuple[Pair, int, bool]] = []
        running = [pair for pair in self.pairs if pair.running]
        count = self.rng.randint(1, self.together) if self.together > 1 else 1
        for pair in self.rng.sample(running, min(count, len(running))):
            start, known = pair.plain.computed, len(pair.plain.tokens)
            decode = start >= pair.plain.target
            if decode and (start >= known + len(pair.unread) or len(pair.unread) == 2):
                pair.unread.append(self.rng.randrange(3))
            end = start + 1
            if not decode:
                end = min(pair.plain.target, start + self.rng.randrange(1, 7))
            if not self.plain.grow(pair.plain, end):
                break
            pair.blocks += self.real.blocks.allocate(-(-end // SIZE) - len(pair.blocks)) or []
            chunks.append((pair, end, decode))
        if running and not chunks:
            self.preempt()
            return
        if self.rng.random() < 0.5:
            self.real.begin_step()
            self.plain.begin_step()
        for pair, end, decode in sorted(chunks, key=lambda chunk: not chunk[2]):
            taken = self.real.computed(pair.real, end, pair.blocks, decode=decode)
            assert [split.position for split in taken] == self.plain.compute(pair.plain, end, decode=decode)
        self.shared_steps += len(chunks) > 1
        self.real.publish()

    def learn(self) -> None:
        for pair in self.pick(running=True):
            if pair.unread:
                token = pair.unread.pop(0)
                self.real.learn(pair.real, token, pair.blocks)
                self.plain.learn(pair.plain, token)

    def preempt(self) -> None:
        for pair in self.pick(running=True):
            self.real.lose(pair.real)
            self.real.blocks.release(pair.blocks)
            self.plain.lose(pair.plain)
            pair.blocks, pair.unread, pair.running = [], [], False

    def abort(self) -> None:
        for pair in self.rng.sample(self.pairs, min(1, len(self.pairs))):
            self.real.lose(pair.real)
            self.real.blocks.release(pair.blocks)
            self.real.close(pair.real)
            self.plain.close(pair.plain)
            self.pairs.remove(pair)

    def evict(self) -> None:
        """Blocks go to somebody who publishes nothing, and come back later."""
        if self.strangers and self.rng.random() < 0.5:
            real, plain = self.strangers.pop()
            self.real.blocks.release(real)
            self.plain.give_back(plain)
            return
        count = self.rng.randrange(1 + min(4, len(self.plain.free)))
        self.strangers.append((self.real.blocks.allocate(count) or [], self.plain.take_blocks(count)))

    def pick(self, *, running: bool) -> list[Pair]:
        fitting = [pair for pair in self.pairs if pair.running == running]
        return self.rng.sample(fitting, min(1, len(fitting)))

    def compare(self) -> None:
        cache = self.real
        cache.check_integrity([pair.real for pair in self.pairs])
        owned = {str(i): pair.blocks for i, pair in enumerate(self.pairs)}
        owned |= {f"stranger {i}": real for i, (real, _) in enumerate(self.strangers)}
        cache.blocks.check_integrity(owned)
        assert cache.blocks.num_free == len(self.plain.free)
        nodes = cache.tree.nodes
        root = chain_root(b"model", b"")

        def node_hash(prefix: tuple[int, ...]) -> bytes:
            return BlockHashes(root, SIZE, prefix).make(len(prefix) // SIZE)[-1]

        assert {c for c, node in nodes.items() if node.block is not None} == {node_hash(p) for p in self.plain.cached}
        assert {c for c, node in nodes.items() if node.snapshot is not None} == {node_hash(p) for p in self.plain.kept}
        assert {c for c, node in nodes.items() if node.wanted} == {node_hash(p) for p in self.plain.wanted}


@pytest.mark.parametrize(
    ("blocks", "snapshots", "every", "guess"),
    [
        (12, None, None, 2),
        (20, 0, None, 2),
        (20, 1, None, 2),
        (16, 3, None, 2),
        (40, 6, None, 128),
        (40, 9, None, 3),
        (24, 4, 2, 2),
        (50, 16, 1, 2),
    ],
)
def test_ten_thousand_random_operations_go_as_in_the_plain_model(
    blocks: int, snapshots: int | None, every: int | None, guess: int
) -> None:
    rng, looks = random.Random(blocks), random.Random(1)
    both = Both(rng, blocks=blocks, snapshots=snapshots, every=every, guess=guess)
    operations = [both.submit, both.admit, both.compute, both.compute, both.compute, both.learn, both.learn]
    operations += [both.preempt, both.abort, both.evict]
    for _ in range(10_000):
        operation = rng.choice(operations)
        if operation == both.submit and len(both.pairs) > 6:
            operation = both.abort
        operation()
        if looks.random() < 0.5:  # a comparison settles what was put off
            both.compare()
    stats = both.real.stats
    assert both.hits > 20 if snapshots != 0 else both.hits == 0
    assert both.waits > 10 if snapshots != 0 else both.waits == 0
    assert stats.blocks_evicted > 50
    assert not snapshots or stats.snapshots_evicted > 20
    guessing = (snapshots or 0) >= 4 and guess < 128 and every != 1
    assert stats.snapshots_guessed > 20 if guessing else stats.snapshots_guessed == 0
    while both.pairs:
        both.abort()
    while both.strangers:
        real, plain = both.strangers.pop()
        both.real.blocks.release(real)
        both.plain.give_back(plain)
    both.compare()
    assert both.real.blocks.num_free == blocks


@pytest.mark.parametrize(("blocks", "snapshots", "every"), [(20, None, None), (40, 6, None), (60, 24, 1)])
def test_steps_of_several_sequences_go_as_in_the_plain_model(
    blocks: int, snapshots: int | None, every: int | None
) -> None:
    """Sequences of one prefix in one step too: what the first one leaves is not left again."""
    looks = random.Random(1)
    both = Both(random.Random(3), blocks=blocks, snapshots=snapshots, every=every, guess=2, together=4)
    operations = [both.submit, both.admit, both.admit, both.compute, both.learn, both.abort, both.evict]
    for _ in range(4_000):
        operation = both.rng.choice(operations)
        if operation == both.submit and len(both.pairs) > 8:
            operation = both.abort
        operation()
        if looks.random() < 0.5:
            both.compare()
    assert both.shared_steps > 50
    assert both.hits > 20


def test_hashes_grow_as_tokens_become_known() -> None:
    tokens = [5, 70_000, 3, 9, 9, 9, 1]
    grown = BlockHashes(chain_root(b""), SIZE, tokens[:1])
    completed = [grown.append(token) for token in tokens[1:]]
    assert completed == [True, False, True, False, True, False]
    assert (grown.num_full, grown.hashes) == (3, []), "nobody asked yet"
    assert len(grown.make(2)) == 2
    assert not grown.append(1) or grown.num_full == 4
    assert grown.make(3) == block_hashes(tokens, SIZE) == BlockHashes(chain_root(b""), SIZE, tokens).make(3)
    assert grown.make(4) == block_hashes([*tokens, 1], SIZE)
    assert chain_root(b"ab", b"c") != chain_root(b"a", b"bc"), "where one part ends matters"


def test_a_snapshot_pool_evicts_the_least_recently_used_and_never_one_being_written() -> None:
    evicted: list[tuple[int, bytes]] = []
    pool = SnapshotPool(FIRST, 3, on_evict=lambda slot, content: evicted.append((slot, content)))
    slots = [pool.take() for _ in range(3)]
    assert slots == [5, 6, 7]
    assert pool.take() is None
    pool.keep(5, b"a")
    pool.keep(7, b"b")
    pool.touch(5)
    assert pool.take() is None, "all were written in this step"
    pool.begin_step()
    assert pool.take() == 7
    assert evicted == [(7, b"b")]
    pool.drop(6)
    assert (pool.num_free, pool.num_kept) == (1, 1)
    pool.check_integrity(taken=[7], kept=[(5, b"a")])
    with pytest.raises(AssertionError, match="owners hold"):
        pool.check_integrity(taken=[], kept=[(5, b"a")])


def test_guesses_have_a_quarter_of_the_snapshots_until_they_are_used() -> None:
    evicted: list[bytes] = []
    pool = SnapshotPool(0, 8, on_evict=lambda slot, content: evicted.append(content))

    def keep(content: bytes, *, guess: bool) -> int | None:
        pool.begin_step()
        slot = pool.take(guess=guess)
        if slot is not None:
            pool.keep(slot, content, guess=guess)
        return slot

    guesses = [keep(name, guess=True) for name in (b"g0", b"g1", b"g2")]
    assert evicted == [b"g0"], "free slots are for others"
    assert guesses[0] == guesses[2]
    pool.touch(guesses[2] or 0)
    third = keep(b"g3", guess=True)
    assert evicted == [b"g0"], "the used one counts no more as a guess"
    for i in range(6):
        keep(b"p%d" % i, guess=False)
    assert evicted == [b"g0", b"g2"], "the oldest of the proven ones, though guesses are there"
    keep(b"g4", guess=True)
    assert evicted[2:] == [b"g1"]
    for _ in range(5):
        pool.begin_step()
        pool.take()
    pool.begin_step()
    assert pool.take() is not None
    assert pool.take() == third, "the last to make room for what was asked for"
    assert evicted[-1] == b"g3"


@pytest.mark.parametrize(("snapshots", "kept"), [(30, range(2, 41, 2)), (6, range(30, 41, 2)), (1, [40])])
def test_a_chunk_leaves_as_many_states_as_there_are_slots_and_the_last_ones(
    snapshots: int, kept: Iterable[int]
) -> None:
    """Every block asks for one. Of the chunk behind it none is left, as all are being written already."""
    cache = make_cache(60, snapshots=snapshots, every=1)
    sequences = []
    for tokens in (list(range(40)), list(range(100, 140))):
        sequence = cache.open(tokens, num_prompt=40, salt="")
        hit = cache.find(sequence, 40)
        cache.claim(sequence, hit, 40)
        cache.admit(sequence, hit)
        splits = cache.computed(sequence, 40, cache.blocks.allocate(20) or [], decode=False)
        cache.publish()
        sequences.append((sequence, splits))
        cache.check_integrity([other for other, _ in sequences])
    (_, first), (_, second) = sequences
    assert [split.position for split in first] == list(kept)
    assert len({split.slot for split in first}) == len(first)
    assert [split.position for split in second] == list(range(42 - 2 * (snapshots - len(first)), 41, 2))
    assert cache.stats.snapshots_taken == snapshots
    assert cache.stats.snapshots_failed == 40 - snapshots


def test_a_newer_block_takes_the_place_of_a_free_one_of_equal_content() -> None:
    """It was computed anew, for want of a snapshot; the old one would be evicted first, and the snapshot with it."""
    cache = make_cache(6, snapshots=2)
    owners: list[tuple[CachedSequence, list[int]]] = []
    for _ in range(2):
        sequence = cache.open([1, 2, 3], num_prompt=3, salt="")
        hit = cache.find(sequence, 3)
        cache.claim(sequence, hit, 3)
        blocks = cache.blocks.allocate(2) or []
        sequence.num_published = 0
        sequence.active = True
        cache.computed(sequence, 2, blocks, decode=False)
        cache.publish()
        cache.blocks.release(blocks)
        cache.close(sequence)
        owners.append((sequence, blocks))
    (found,) = [node.block for node in cache.tree.nodes.values()]
    assert found == owners[1][1][0]
    cache.check_integrity([])


def test_reasons() -> None:
    cache = make_cache(12, snapshots=2)

    def found(tokens: list[int]) -> tuple[int, CacheReason, int]:
        sequence = cache.open(tokens, num_prompt=len(tokens), salt="")
        hit = cache.find(sequence, len(tokens))
        cache.close(sequence)
        return hit.num_tokens, hit.reason, hit.num_found

    first = cache.open([1, 2, 3, 4, 5, 6, 7], num_prompt=7, salt="")
    hit = cache.find(first, 7)
    assert (hit.num_tokens, hit.reason) == (0, CacheReason.NOTHING_LONGER)
    cache.claim(first, hit, 7)
    cache.admit(first, hit)
    blocks = cache.blocks.allocate(4) or []
    assert cache.computed(first, 7, blocks, decode=False) == [Split(6, FIRST)]
    cache.publish()
    assert found([1, 2, 3, 4, 5, 6, 7]) == (6, CacheReason.NOTHING_LONGER, 3)
    assert found([1, 2, 3, 4, 5, 6]) == (0, CacheReason.NO_SNAPSHOT, 3)
    assert found([1, 2, 3, 4, 9, 9]) == (0, CacheReason.NO_SNAPSHOT, 2)
    assert found([9, 2, 3, 4]) == (0, CacheReason.NOTHING_LONGER, 0)
    assert found([1]) == (0, CacheReason.SHORT, 0)
    cache.blocks.release(blocks)
    cache.close(first)
    cache.check_integrity([])


def test_prompts_are_hashed_as_far_as_they_go_together_and_a_block_further() -> None:
    """Until they are computed; of what one goes on with alone nothing is hashed, however long it is."""
    cache = make_cache(80)

    def enter(tokens: list[int]) -> CachedSequence:
        return cache.open(tokens, num_prompt=len(tokens), salt="")

    def hashed(*sequences: CachedSequence) -> list[int]:
        assert [len(sequence.path) for sequence in sequences] == [len(s.hashes.hashes) for s in sequences]
        return [len(sequence.path) for sequence in sequences]

    first = enter(list(range(60)))
    assert hashed(first) == [1]
    second = enter([*range(20), *range(100, 140)])
    assert hashed(first, second) == [11, 11]
    third = enter([*range(20), *range(100, 110), *range(30)])
    assert hashed(first, second, third) == [11, 16, 16]
    inner, stranger = enter(list(range(30))), enter(list(range(200, 260)))
    assert hashed(first, second, third, inner, stranger) == [15, 16, 16, 15, 1], "one ends within the first"
    sequences = [first, second, third, inner, stranger]
    cache.check_integrity(sequences)

    hit = cache.find(first, 60)
    cache.claim(first, hit, 60)
    cache.admit(first, hit)
    awaited = [cache.worth_waiting(other, cache.find(other, 60), 60) for other in sequences[1:]]
    assert awaited == [first.path[9], first.path[9], first.path[14], None]
    later = enter([*range(50), 7, 7])
    awaited = [cache.worth_waiting(later, cache.find(later, 52), 52)]
    assert awaited == [first.path[24]], "it had no node at the claim"
    assert hashed(first, later) == [26, 26]
    blocks = cache.blocks.allocate(30) or []
    cache.computed(first, 55, blocks, decode=False)
    assert hashed(first) == [26]
    with pytest.raises(AssertionError, match="of 1 prompts is not published"):
        cache.find(later, 52)
    cache.publish()
    assert hashed(first, later) == [27, 26]
    assert cache.find(later, 52).num_tokens == 50
    cache.computed(first, 60, blocks, decode=False)
    cache.publish()
    assert hashed(first, later) == [30, 26]
    for sequence in sequences:
        cache.close(sequence)
    cache.check_integrity([later])
