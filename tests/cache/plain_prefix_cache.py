"""The prefix cache in plain Python: prefixes are tuples of tokens, everything is searched, nothing is clever."""

from __future__ import annotations

from dataclasses import dataclass, field

Prefix = tuple[int, ...]


@dataclass(eq=False)
class PlainBlock:
    owners: int = 0
    content: Prefix | None = None


@dataclass(eq=False)
class PlainSequence:
    tokens: list[int]
    running: bool = False
    computed: int = 0
    target: int = 0
    blocks: list[PlainBlock] = field(default_factory=list)
    published: int = 0
    pending: list[int] = field(default_factory=list)
    fresh: set[int] = field(default_factory=set)
    """Those of ``pending`` that the step being planned writes."""
    generated: Prefix | None = None


class PlainPrefixCache:
    """The rules of ``PrefixCache`` and ``BlockPool``, once more.

    Attributes:
        free: blocks without owners, the next to be handed out first.
        proven: prefixes with a snapshot that was asked for or used, least recently used first.
        guesses: prefixes with another one, oldest first; a quarter of the snapshots at most.
        written: prefixes whose snapshot is written by the step being planned, which keeps it.
        claimed: prefixes, and who said last that it would compute their last block.
    """

    def __init__(self, num_blocks: int, size: int, *, snapshots: int | None, every: int | None, guess: int) -> None:
        self.size = size
        self.guess = guess
        self.snapshots = snapshots
        self.every = every
        self.free = [PlainBlock() for _ in range(num_blocks)]
        self.live: list[PlainSequence] = []
        self.proven: list[Prefix] = []
        self.guesses: list[Prefix] = []
        self.written: set[Prefix] = set()
        self.wanted: set[Prefix] = set()
        self.cached: dict[Prefix, PlainBlock] = {}
        self.claimed: dict[Prefix, PlainSequence] = {}

    @property
    def kept(self) -> list[Prefix]:
        return self.proven + self.guesses

    def begin_step(self) -> None:
        self.written.clear()
        for sequence in self.live:
            sequence.fresh.clear()

    def open(self, tokens: list[int]) -> PlainSequence:
        sequence = PlainSequence(list(tokens))
        known = 0
        for end in range(self.size, len(tokens) + 1, self.size):
            if self._exists(tuple(tokens[:end])):
                known = end
        self.live.append(sequence)
        place = min(known, (len(tokens) - 1) // self.size * self.size)
        if place and self.snapshots is not None:
            self.wanted.add(tuple(tokens[:place]))
        return sequence

    def find(self, sequence: PlainSequence) -> int:
        """Tokens that it can take over."""
        best = end = 0
        while end + self.size < len(sequence.tokens) and tuple(sequence.tokens[: end + self.size]) in self.cached:
            end += self.size
            if self.snapshots is None or tuple(sequence.tokens[:end]) in self.kept:
                best = end
        return best

    def worth_waiting(self, sequence: PlainSequence) -> int:
        """Behind which token the last block ends that it should wait for; 0 if none."""
        last = 0
        for end in range(self.find(sequence) + self.size, len(sequence.tokens), self.size):
            prefix = tuple(sequence.tokens[:end])
            producer = self.claimed.get(prefix)
            if producer is not None and producer.running and producer.computed < end:
                leaves = prefix not in self.cached if self.snapshots is None else self._leaves(producer, end)
                last = end if leaves else last
            elif prefix not in self.cached:
                break
        return last

    def admit(self, sequence: PlainSequence) -> None:
        hit = self.find(sequence)
        sequence.target = len(sequence.tokens)
        sequence.running = True
        for end in range(hit + self.size, len(sequence.tokens) + 1, self.size):
            self.claimed[tuple(sequence.tokens[:end])] = sequence
        for end in range(self.size, hit + 1, self.size):
            block = self.cached[tuple(sequence.tokens[:end])]
            if not block.owners:
                self.free.remove(block)
            block.owners += 1
            sequence.blocks.append(block)
        if hit and self.snapshots is not None:
            self._touch(tuple(sequence.tokens[:hit]))
        sequence.computed = hit
        sequence.published = hit

    def grow(self, sequence: PlainSequence, end: int) -> bool:
        """Blocks for positions up to ``end``; False if there are too few."""
        missing = -(-end // self.size) - len(sequence.blocks)
        if missing > len(self.free):
            return False
        sequence.blocks += [self._take_block() for _ in range(missing)]
        return True

    def compute(self, sequence: PlainSequence, end: int, *, decode: bool) -> list[int]:
        """Positions up to ``end`` are computed; behind which of them a snapshot is taken."""
        start, sequence.computed = sequence.computed, end
        self.publish(sequence)
        if self.snapshots is None:
            return []
        if not decode:
            return self._leave(sequence, self._wanted(sequence, start, end))
        if end % self.size:
            return []
        known = end <= len(sequence.tokens)
        prefix = tuple(sequence.tokens[:end])
        if known and prefix in self.kept:
            self._touch(prefix)
            return []
        if self._full():
            self._drop_generated(sequence)
        if self._full() and not self._evict(self.proven) and not self._evict(self.guesses):
            return []
        if known:
            self._keep(sequence, prefix, fresh=True)
        else:
            sequence.pending.append(end)
            sequence.fresh.add(end)
        return [end]

    def learn(self, sequence: PlainSequence, token: int) -> None:
        sequence.tokens.append(token)
        self.publish(sequence)

    def publish(self, sequence: PlainSequence) -> None:
        until = min(sequence.computed, len(sequence.tokens)) // self.size * self.size
        for end in range(sequence.published + self.size, until + 1, self.size):
            prefix = tuple(sequence.tokens[:end])
            block = sequence.blocks[end // self.size - 1]
            before = self.cached.get(prefix)
            if before is not None and before.owners:
                continue
            if before is not None:
                before.content = None
                self.free.remove(before)
                self.free.insert(0, before)
            block.content = prefix
            self.cached[prefix] = block
        sequence.published = max(sequence.published, until)
        while sequence.pending and sequence.pending[0] <= sequence.published:
            end = sequence.pending.pop(0)
            self._keep(sequence, tuple(sequence.tokens[:end]), fresh=end in sequence.fresh)

    def lose(self, sequence: PlainSequence) -> None:
        for block in reversed(sequence.blocks):
            block.owners -= 1
            if not block.owners:
                self.free.insert(0 if block.content is None else len(self.free), block)
        sequence.blocks, sequence.pending, sequence.generated = [], [], None
        sequence.fresh.clear()
        sequence.running = False
        sequence.computed = sequence.published = 0

    def close(self, sequence: PlainSequence) -> None:
        self.lose(sequence)
        self.live.remove(sequence)
        self._forget_wishes()

    def take_blocks(self, count: int) -> list[PlainBlock]:
        """Blocks for somebody else."""
        return [self._take_block() for _ in range(count)]

    def give_back(self, blocks: list[PlainBlock]) -> None:
        for block in reversed(blocks):
            block.owners = 0
            self.free.insert(0, block)

    def _take_block(self) -> PlainBlock:
        block = self.free.pop(0)
        block.owners = 1
        if block.content is not None:
            del self.cached[block.content]
            if block.content in self.kept:
                self._drop(block.content)
            block.content = None
            self._forget_wishes()
        return block

    def _wanted(self, sequence: PlainSequence, start: int, end: int) -> list[int]:
        """Block ends behind ``start``, up to ``end``, at which the sequence should leave a snapshot."""
        ends = range(start // self.size * self.size + self.size, min(end, len(sequence.tokens)) + 1, self.size)
        return [e for e in ends if self._leaves(sequence, e)]

    def _leaves(self, sequence: PlainSequence, end: int) -> bool:
        """It should leave a snapshot there when it comes by."""
        fits = self._asked(sequence, end) or (self._is_guess(end) and (self.snapshots or 0) >= 4)
        return fits and bool(self.snapshots) and tuple(sequence.tokens[:end]) not in self.kept

    def _leave(self, sequence: PlainSequence, wanted: list[int]) -> list[int]:
        """Those of the wanted places that get a snapshot: if there are too few, the last ones that are asked for."""
        left: list[int] = []
        for place in wanted:
            room = self._take(sequence, place)
            if not room and left and self._asked(sequence, place):
                self._drop(tuple(sequence.tokens[: left.pop(0)]))
                room = self._take(sequence, place)
            if room:
                left.append(place)
        return left

    def _asked(self, sequence: PlainSequence, end: int) -> bool:
        last = sequence.target // self.size * self.size
        wanted = tuple(sequence.tokens[:end]) in self.wanted
        return wanted or end == last or (self.every is not None and end // self.size % self.every == 0)

    def _is_guess(self, end: int) -> bool:
        return end in {-(-self.guess // self.size) * self.size * 2**power for power in range(10)}

    def _take(self, sequence: PlainSequence, end: int) -> bool:
        """A snapshot behind a block of a prompt; whether there was room."""
        assert self.snapshots is not None
        guess = not self._asked(sequence, end)
        if guess and len(self.guesses) >= self.snapshots // 4:
            room = self._evict(self.guesses)
        else:
            room = not self._full() or self._evict(self.proven) or (not guess and self._evict(self.guesses))
        if room:
            prefix = tuple(sequence.tokens[:end])
            (self.guesses if guess else self.proven).append(prefix)
            self.written.add(prefix)
        return room

    def _full(self) -> bool:
        return len(self.kept) + sum(len(other.pending) for other in self.live) == self.snapshots

    def _evict(self, some: list[Prefix]) -> bool:
        if not some or some[0] in self.written:
            return False
        some.pop(0)
        return True

    def _keep(self, sequence: PlainSequence, prefix: Prefix, *, fresh: bool) -> None:
        if prefix in self.kept:
            return
        self.proven.append(prefix)
        if fresh:
            self.written.add(prefix)
        self._drop_generated(sequence)
        sequence.generated = prefix

    def _drop_generated(self, sequence: PlainSequence) -> None:
        prefix, sequence.generated = sequence.generated, None
        if prefix is not None and prefix in self.kept and prefix not in self.wanted:
            self._drop(prefix)

    def _drop(self, prefix: Prefix) -> None:
        (self.guesses if prefix in self.guesses else self.proven).remove(prefix)
        self.written.discard(prefix)

    def _touch(self, prefix: Prefix) -> None:
        (self.guesses if prefix in self.guesses else self.proven).remove(prefix)
        self.proven.append(prefix)

    def _exists(self, prefix: Prefix) -> bool:
        """Some unfinished sequence or cached block has it, or continues it."""
        count = len(prefix)
        known = [tuple(s.tokens[: len(s.tokens) // self.size * self.size]) for s in self.live]
        return any(other[:count] == prefix for other in (*known, *self.cached))

    def _forget_wishes(self) -> None:
        self.wanted = {prefix for prefix in self.wanted if self._exists(prefix)}
