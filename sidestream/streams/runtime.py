"""One device's streams at work: the dedicated compute stream, the step that runs, and captured graphs.

Everything a handoff must know about captures is kept here, by what was begun and ended. It is never asked of the
device: inside an eager break of a breakable capture the device already says "not capturing", although the events that
reach the break were recorded in a capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from sidestream.errors import GraphError, HandoffError
from sidestream.streams.backend import Graph, Policy, Stream, StreamBackend, choose_policy


class CrossingWait(Protocol):
    """A wait that a graph holds on something published outside of it."""

    @property
    def handoff_name(self) -> str: ...

    def before_replay(self) -> None:
        """Check that the recorded wait is not a stale one, and do what the graph could not record."""
        ...


class CapturedPublish(Protocol):
    """A publish that a graph holds."""

    @property
    def handoff_name(self) -> str: ...

    def before_replay(self) -> None:
        """Check that this step has not published already."""
        ...

    def after_replay(self) -> None:
        """The replay published."""
        ...


class Capture:
    """A captured graph together with the handoffs that it publishes and waits on.

    Replaying it counts as publishing what was published when it was captured.

    Attributes:
        closed: nothing outside waits for what it publishes.
    """

    def __init__(self, streams: Streams, name: str, graph: Graph, *, closed: bool) -> None:
        self.name = name
        self.closed = closed
        self._streams = streams
        self._graph = graph
        self._publishes: list[CapturedPublish] = []
        self._waits: list[CrossingWait] = []
        self._usable = False

    @property
    def published(self) -> tuple[str, ...]:
        """Names of the handoffs that a replay publishes."""
        return tuple(publish.handoff_name for publish in self._publishes)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Names of the handoffs published elsewhere that a replay waits on."""
        return tuple(wait.handoff_name for wait in self._waits)

    def add_publish(self, publish: CapturedPublish) -> None:
        """Called by a handoff that publishes while this capture is open."""
        self._publishes.append(publish)

    def add_wait(self, wait: CrossingWait) -> None:
        """Called by a handoff that is waited on while this capture is open, but was published outside."""
        self._waits.append(wait)

    def replay(self) -> None:
        """Launch the graph on the current stream.

        Raises:
            GraphError: the capture is open or was dropped, or another one is open.
            HandoffError: the graph waits on a handoff that this step did not publish in the place where it was
                published at capture, so the recorded wait would be a stale one.
        """
        if not self._usable:
            raise GraphError(f"capture {self.name!r} is still open or was dropped, so there is nothing to replay")
        streams = self._streams
        if streams.open_capture is not None:
            raise GraphError(
                f"replay of {self.name!r} inside {streams.open_capture!r}; replay it before or behind that"
            )
        for wait in self._waits:
            wait.before_replay()
        for publish in self._publishes:
            publish.before_replay()
        streams.backend.replay(self._graph)
        for publish in self._publishes:
            publish.after_replay()

    def __repr__(self) -> str:
        return f"Capture({self.name!r})"


class Streams:
    """Owner of a device's streams.

    Args:
        backend: the device.
        policy: of waits across capture boundaries; None takes the best that the device can do.

    Attributes:
        compute: the dedicated stream to compute on. Making it carries over work already queued on the stream that
            was current, so weights loaded there are seen.
        report: the policy and its reason.
        step: number of the step that runs; handoffs are valid inside one step.
        open_capture: the capture being recorded, or None; None also inside an eager break.
    """

    def __init__(self, backend: StreamBackend, *, policy: Policy | str | None = None) -> None:
        self.backend = backend
        self.report = choose_policy(backend, policy)
        self.compute = backend.new_stream("compute")
        before = backend.current_stream()
        with backend.use(self.compute):
            backend.wait_stream(before)
        self.step = 0
        self.open_capture: Capture | None = None
        self._producers: dict[str, str] = {}

    def new_stream(self, name: str) -> Stream:
        """A side stream."""
        return self.backend.new_stream(name)

    def begin_step(self) -> None:
        """Start a step: whatever was published before is no longer valid."""
        if self.open_capture is not None:
            raise GraphError(f"a step begins inside {self.open_capture!r}; a capture is part of one step")
        self.step += 1

    def claim_name(self, name: str, producer: str) -> None:
        """Handoff names are unique, so that a message points to one place.

        Raises:
            HandoffError: the name is taken.
        """
        if name in self._producers:
            raise HandoffError(
                f"handoff {name!r} of producer {producer!r}: the name is taken by producer {self._producers[name]!r}"
            )
        self._producers[name] = producer

    @contextmanager
    def capture(self, name: str, *, pool: Any = None, closed: bool = False) -> Iterator[Capture]:
        """Record the block's work on the current stream as a graph; nothing of it runs before ``replay``.

        Streams that wait on an event of the block join the recording and must be waited for again before its end.
        An error inside leaves no capture open and the capture unusable.

        Args:
            pool: memory pool from ``backend.new_pool()``; None gives the graph its own.
            closed: promise that nothing outside waits for what the block publishes. Its handoffs are then edges alone
                and cost nothing at a replay; otherwise each publish is a node of the graph, for which a launch takes
                some 5 us more on the host (measured on an H200).
        """
        if self.open_capture is not None:
            raise GraphError(f"capture {name!r} inside {self.open_capture!r}; captures do not nest")
        graph = self.backend.begin_capture(name, pool)
        capture = Capture(self, name, graph, closed=closed)
        self.open_capture = capture
        try:
            yield capture
        except BaseException:
            self.open_capture = None
            self.backend.abort_capture(graph)
            raise
        self.open_capture = None
        self.backend.end_capture(graph)
        capture._usable = True
