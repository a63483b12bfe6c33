"""Who waits to run, in order of arrival; who waits for a prefix that another one computes stands apart, under it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from sidestream.cache.prefix_stats import PrefixStats
from sidestream.cache.prefix_tree import PrefixNode, Producer
from sidestream.scheduler.sequence import Sequence

Place = tuple[int, Sequence]
"""Arrival, which tells places apart, and who stands there."""


@dataclass(slots=True, eq=False)
class _Group:
    """Sequences that wait for the same block.

    Attributes:
        members: in order.
        producer: who computes the block; None once that has changed: then the first member stands in the line, for all.
    """

    node: PrefixNode
    members: list[Place] = field(default_factory=list)
    producer: Producer | None = None


@dataclass(slots=True)
class _Wait:
    """A sequence in a group: since which turn, and until which at most."""

    group: _Group
    since: int
    until: int


class WaitingLine:
    """The line, and groups beside it of those that wait for a prefix.

    A group costs a step nothing until its block is there, whoever computes that has stopped, or a member has waited
    long enough. Then its first member comes back into the line, and what holds for it holds for the group: if somebody
    else computes the block by then, or one that leads to it, all of it goes and waits for that.

    Groups stay under one that was looked at and found no room: it is the next to run. Whoever is waited for waits for
    nobody when that begins, so waiting never goes in a circle.

    Args:
        block_size: tokens a block.
        patience: turns that a sequence waits for prefixes at most, in all.
    """

    def __init__(self, *, block_size: int, patience: int, stats: PrefixStats) -> None:
        self._stats = stats
        self._block_size = block_size
        self._patience = patience
        self._turn = 0
        self._all: set[Sequence] = set()
        self._line: list[Place] = []
        self._waits: dict[Sequence, _Wait] = {}
        self._groups: dict[PrefixNode, _Group] = {}
        self._under: dict[Producer, list[tuple[int, _Group]]] = {}  # by depth of the block, which tells them apart
        self._until: list[tuple[int, int, Sequence]] = []  # last turn, arrival

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all)

    def add(self, sequence: Sequence) -> None:
        """It takes its place in the line."""
        self._all.add(sequence)
        insort(self._line, (sequence.arrival, sequence))

    def remove(self, sequence: Sequence) -> None:
        """It does not wait any more, wherever it stood."""
        self._all.remove(sequence)
        self._leave(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """``add`` was interrupted, or what came behind it: make it undone."""
        self._all.discard(sequence)
        self._line = [place for place in self._line if place[1] is not sequence]

    def next_turn(self) -> None:
        """Somebody may run: who has waited long enough for prefixes stands in the line again."""
        self._turn += 1
        while self._until and self._until[0][0] <= self._turn:
            sequence = self._until[0][2]
            self._leave(sequence)
            insort(self._line, (sequence.arrival, sequence))

    def first(self) -> Sequence | None:
        """Who is next."""
        return self._line[0][1] if self._line else None

    def awaited(self, sequence: Sequence) -> PrefixNode | None:
        """The block that it waited for until it came back into the line, with the rest of its group behind it."""
        wait = self._waits.get(sequence)
        return None if wait is None else wait.group.node

    def park(self, sequence: Sequence, node: PrefixNode) -> None:
        """The first in the line waits for a block on its path that ``node.producer`` computes, who does not wait.

        So does its group, if the block leads to the one that the group waited for, or is the same.
        """
        wait = self._waits.get(sequence)
        if wait is None or node.depth > wait.group.node.depth:
            group = self._enter(sequence, node)
        else:
            group = self._move(wait.group, node)
        producer = node.producer
        assert producer is not None, f"nobody computes block {node.depth}"
        assert producer.active, f"who computes block {node.depth} does not run"
        if group.producer is not producer:
            self._release(group)
            group.producer = producer
            insort(self._under.setdefault(producer, []), (node.depth, group))

    def wake(self, producer: Producer | None, num_tokens: int | None = None) -> None:
        """A sequence has computed so many tokens or, if None, computes no more."""
        if producer is None or (groups := self._under.get(producer)) is None:
            return
        ready = len(groups)
        if num_tokens is not None:
            ready = bisect_left(groups, (num_tokens // self._block_size + 1,))
        for _, group in groups[:ready]:
            group.producer = None
            insort(self._line, group.members[0])
        del groups[:ready]
        if not groups:
            del self._under[producer]

    def _leave(self, sequence: Sequence) -> None:
        """Out of the line, or out of its group."""
        place = (sequence.arrival,)
        wait = self._waits.pop(sequence, None)
        if wait is None:
            del self._line[bisect_left(self._line, place)]
            return
        sequence.waited += self._turn - wait.since
        self._stats.wait_steps += self._turn - wait.since
        del self._until[bisect_left(self._until, (wait.until, sequence.arrival))]
        group = wait.group
        self._stand_back(group)
        del group.members[bisect_left(group.members, place)]
        if not group.members:
            self._release(group)
            del self._groups[group.node]
        elif group.producer is None:
            insort(self._line, group.members[0])

    def _enter(self, sequence: Sequence, node: PrefixNode) -> _Group:
        """From the line, or another group, into the block's."""
        self._leave(sequence)
        self._stats.waited += sequence.waited == 0
        group = self._groups.setdefault(node, _Group(node))
        self._stand_back(group)
        insort(group.members, (sequence.arrival, sequence))
        wait = _Wait(group, since=self._turn, until=self._turn + self._patience - sequence.waited)
        self._waits[sequence] = wait
        insort(self._until, (wait.until, sequence.arrival, sequence))
        return group

    def _move(self, group: _Group, node: PrefixNode) -> _Group:
        """A whole group, whose first stands in the line, to another block; the group of those that wait there then."""
        self._stand_back(group)
        del self._groups[group.node]
        other = self._groups.get(node)
        if other is not None:
            self._stand_back(other)
            if len(other.members) > len(group.members):
                group, other = other, group
            for place in other.members:
                insort(group.members, place)
                self._waits[place[1]].group = group
            self._release(other)
        group.node = node
        self._groups[node] = group
        return group

    def _stand_back(self, group: _Group) -> None:
        """Nobody stands in the line for the group."""
        if group.producer is None and group.members:
            del self._line[bisect_left(self._line, (group.members[0][0],))]

    def _release(self, group: _Group) -> None:
        """Nobody is known to compute the block."""
        producer, group.producer = group.producer, None
        if producer is not None:
            groups = self._under[producer]
            del groups[bisect_left(groups, (group.node.depth,))]
            if not groups:
                del self._under[producer]

    def check_integrity(self, alive: Collection[Producer]) -> None:
        """Recount lines and groups; an AssertionError names what differs.

        Args:
            alive: whoever may still compute something, waiting or not.
        """
        blocked = {id(group) for groups in self._under.values() for _, group in groups}
        line = [place for s in self._all if s not in self._waits for place in [(s.arrival, s)]]
        for node, group in self._groups.items():
            name = f"the group of block {node.depth}"
            assert group.node is node, f"{name} is another's"
            assert group.members, f"{name} is empty"
            assert group.members == sorted(group.members), f"{name} is out of order"
            assert (group.producer is not None) == (id(group) in blocked), f"{name} is blocked and is not"
            if group.producer is None:
                line.append(group.members[0])
            else:
                assert group.producer in alive, f"{name} waits for one that is gone"
                assert (node.depth, group) in self._under[group.producer], f"{name} is under another one"
                assert group.producer.num_computed < node.depth * self._block_size, f"{name} has what it waits for"
        members = {s: group for group in self._groups.values() for _, s in group.members}
        assert members == {s: wait.group for s, wait in self._waits.items()}, "groups and members disagree"
        assert len(blocked) == sum(group.producer is not None for group in self._groups.values()), "a group is lost"
        assert self._line == sorted(line), f"the line is {[a for a, _ in self._line]}, not {sorted(a for a, _ in line)}"
        until = sorted((wait.until, s.arrival) for s, wait in self._waits.items())
        assert [(turn, arrival) for turn, arrival, _ in self._until] == until, "ends of waits differ"
        assert self._waits.keys() <= self._all, "one waits for a prefix that does not wait at all"
        assert all(wait.until > self._turn for wait in self._waits.values()), "one waits longer than it may"
