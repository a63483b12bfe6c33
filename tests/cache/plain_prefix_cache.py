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
    computed: int = 0
    target: int = 0
    blocks: list[PlainBlock] = field(default_factory=list)
    published: int = 0
    pending: list[int] = field(default_factory=list)
    generated: Prefix | None = None


class PlainPrefixCache:
    """The rules of ``PrefixCache`` and ``BlockPool``, once more.

    Attributes:
        free: blocks without owners, the next to be handed out first.
        kept: prefixes with a snapshot, least recently used first.
    """

    def __init__(self, num_blocks: int, size: int, *, snapshots: int | None, every: int | None) -> None:
        self.size = size
        self.snapshots = snapshots
        self.every = every
        self.free = [PlainBlock() for _ in range(num_blocks)]
        self.live: list[PlainSequence] = []
        self.kept: list[Prefix] = []
        self.wanted: set[Prefix] = set()
        self.cached: dict[Prefix, PlainBlock] = {}

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

    def admit(self, sequence: PlainSequence) -> None:
        hit = self.find(sequence)
        sequence.target = len(sequence.tokens)
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

    def chunk_end(self, sequence: PlainSequence, end: int) -> int:
        """Where a prefill chunk that could reach ``end`` stops."""
        first = sequence.computed // self.size * self.size + self.size
        for boundary in range(first, min(end, len(sequence.tokens) + 1), self.size):
            if self._wants(sequence, boundary):
                return boundary
        return end

    def grow(self, sequence: PlainSequence, end: int) -> bool:
        """Blocks for positions up to ``end``; False if there are too few."""
        missing = -(-end // self.size) - len(sequence.blocks)
        if missing > len(self.free):
            return False
        sequence.blocks += [self._take_block() for _ in range(missing)]
        return True

    def compute(self, sequence: PlainSequence, end: int, *, decode: bool) -> bool:
        """Positions up to ``end`` are computed; whether a snapshot is taken behind them."""
        sequence.computed = end
        self.publish(sequence)
        if self.snapshots is None or end % self.size:
            return False
        known = end <= len(sequence.tokens)
        prefix = tuple(sequence.tokens[:end])
        if known and prefix in self.kept:
            self._touch(prefix)
            return False
        if not decode and not self._wants(sequence, end):
            return False
        taken = sum(len(other.pending) for other in self.live)
        if len(self.kept) + taken == self.snapshots and decode:
            self._drop_generated(sequence)
        if len(self.kept) + taken == self.snapshots:
            if not self.kept:
                return False
            self.kept.pop(0)
        if known:
            self._keep(sequence, prefix, generated=decode)
        else:
            sequence.pending.append(end)
        return True

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
            self._keep(sequence, tuple(sequence.tokens[: sequence.pending.pop(0)]), generated=True)

    def lose(self, sequence: PlainSequence) -> None:
        for block in reversed(sequence.blocks):
            block.owners -= 1
            if not block.owners:
                self.free.insert(0 if block.content is None else len(self.free), block)
        sequence.blocks, sequence.pending, sequence.generated = [], [], None
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
                self.kept.remove(block.content)
            block.content = None
            self._forget_wishes()
        return block

    def _wants(self, sequence: PlainSequence, end: int) -> bool:
        prefix = tuple(sequence.tokens[:end])
        if prefix in self.kept or not self.snapshots or end > len(sequence.tokens):
            return False
        last = sequence.target // self.size * self.size
        return prefix in self.wanted or end == last or (self.every is not None and end // self.size % self.every == 0)

    def _keep(self, sequence: PlainSequence, prefix: Prefix, *, generated: bool) -> None:
        if prefix in self.kept:
            return
        self.kept.append(prefix)
        if generated:
            self._drop_generated(sequence)
            sequence.generated = prefix

    def _drop_generated(self, sequence: PlainSequence) -> None:
        prefix, sequence.generated = sequence.generated, None
        if prefix is not None and prefix in self.kept and prefix not in self.wanted:
            self.kept.remove(prefix)

    def _touch(self, prefix: Prefix) -> None:
        self.kept.remove(prefix)
        self.kept.append(prefix)

    def _exists(self, prefix: Prefix) -> bool:
        """Some unfinished sequence or cached block has it, or continues it."""
        count = len(prefix)
        known = [tuple(s.tokens[: len(s.tokens) // self.size * self.size]) for s in self.live]
        return any(other[:count] == prefix for other in (*known, *self.cached))

    def _forget_wishes(self) -> None:
        self.wanted = {prefix for prefix in self.wanted if self._exists(prefix)}
