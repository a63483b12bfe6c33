"""Graphs of the simulated device: recorded operators, instantiated anew at each replay."""

from __future__ import annotations

from dataclasses import dataclass, field

from sidestream.streams.backend import Stream
from sidestream.streams.simulated.hazards import Touch
from sidestream.streams.simulated.memory import Block, Pool
from sidestream.streams.simulated.schedule import Node, Run
from sidestream.streams.simulated.site import Site

REUSE = "reuse of released memory"
"""Label of what overwrites released memory: work of the simulation that no CUDA graph would hold."""


class DeviceError(RuntimeError):
    """What CUDA would answer."""


@dataclass(slots=True, eq=False)
class SimStream:
    """A queue. ``frontier``: what the next work on it must follow; ``recording``: the graph that it records into."""

    handle: Stream
    timeline: int
    frontier: tuple[Node, ...] = ()
    recording: SimGraph | None = None


@dataclass(slots=True, eq=False)
class SimEvent:
    """Refers to nodes, or, while a graph is recorded, to recorded operators.

    Attributes:
        nodes: None if it was never recorded.
        recording: the graph in which it is an edge, else None.
        recorded_by: the graph that holds its record node, and where that was written.
        place: where it was recorded last.
    """

    external: bool
    nodes: tuple[Node, ...] | None = None
    recording: SimGraph | None = None
    frontier: tuple[int, ...] = ()
    recorded_by: tuple[SimGraph, Site] | None = None
    place: Site | None = None


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """One operator of a graph; ``deps`` are places in the graph's list."""

    label: str
    site: Site
    where: str
    timeline: int
    run: Run | None
    touches: tuple[Touch, ...]
    deps: tuple[int, ...]
    records: SimEvent | None = None
    awaits: SimEvent | None = None


@dataclass(slots=True, eq=False)
class SimGraph:
    """Attributes:
    origin: the stream that the capture began on, and ``begun`` the place.
    frontiers: what the next operator of each recording stream follows.
    last: nodes of the last replay that nothing in the graph follows; a graph never runs beside itself.
    """

    name: str
    pool: Pool
    origin: SimStream
    begun: Site
    ops: list[RecordedOp] = field(default_factory=list)
    frontiers: dict[SimStream, tuple[int, ...]] = field(default_factory=dict)
    timelines: dict[SimStream, int] = field(default_factory=dict)
    open: bool = True
    replays: int = 0
    last: tuple[Node, ...] = ()
    _blocks: set[Block] = field(default_factory=set)

    def uses(self, block: Block) -> bool:
        """Whether an operator recorded so far touches the memory."""
        return block in self._blocks

    def add(
        self,
        stream: SimStream,
        label: str,
        site: Site,
        *,
        run: Run | None = None,
        touches: tuple[Touch, ...] = (),
        records: SimEvent | None = None,
        awaits: SimEvent | None = None,
    ) -> None:
        """Record an operator on a stream."""
        self._blocks.update(touch.block for touch in touches)
        where = stream.handle.name
        deps = self.frontiers[stream]
        self.ops.append(
            RecordedOp(label, site, where, self.timelines[stream], run, touches, deps, records=records, awaits=awaits)
        )
        self.frontiers[stream] = (len(self.ops) - 1,)

    def follow(self, stream: SimStream, frontier: tuple[int, ...]) -> None:
        """Make the stream's next operator follow others of this graph."""
        self.frontiers[stream] = tuple(dict.fromkeys((*self.frontiers[stream], *frontier)))

    def leaves(self) -> tuple[int, ...]:
        """Operators that no other follows."""
        followed = {dep for op in self.ops for dep in op.deps}
        return tuple(i for i in range(len(self.ops)) if i not in followed)

    def unjoined(self) -> list[RecordedOp]:
        """The last operators of streams that the origin did not wait for."""
        joined: set[int] = set()
        stack = list(self.frontiers[self.origin])
        while stack:
            index = stack.pop()
            if index not in joined:
                joined.add(index)
                stack.extend(self.ops[index].deps)
        ends = {index for frontier in self.frontiers.values() for index in frontier}
        return [self.ops[index] for index in sorted(ends - joined) if self.ops[index].label != REUSE]

    def close(self) -> None:
        """No stream records any more."""
        self.open = False
        for stream in self.frontiers:
            stream.recording = None
