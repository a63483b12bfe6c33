"""A handoff: one object that owns both sides of an ordering between two streams.

What a wait becomes depends on where it stands and where the publish stood:

    published in   waited on in                   policy external                     policy stream
    eager          eager                          event                               whole-stream wait
    capture X      capture X                      edge of the graph                   whole-stream wait, edges too
    capture X      eager break or another graph   external event, recorded by X       whole-stream wait
    eager          capture                        external event, awaited by a node   whole-stream wait before replay
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

from sidestream.errors import HandoffError
from sidestream.streams.backend import Event, Policy, Stream
from sidestream.streams.runtime import Capture, Streams


class WaitKind(Enum):
    """What a wait became."""

    EVENT = "event"
    EDGE = "edge of the same graph"
    EXTERNAL_EVENT = "external event recorded by a graph"
    EXTERNAL_NODE = "external event awaited by a graph"
    WHOLE_STREAM = "whole stream"

    __hash__ = object.__hash__  # members are single objects; by name, counting took half of a wait


@dataclass(slots=True)  # not frozen: one is made at every publish, and freezing makes that three times as slow
class _Publication:
    """Where and when the last publish happened; never changed once made.

    Attributes:
        source: the capture that published, None if it was eager code.
        stream: it published on, or was replayed on.
        ran: False between the capture of a publish and the graph's first replay.
        mark: event for waits outside of ``source``; None under policy stream.
        edge: event for waits inside of ``source``, while that is open.
    """

    step: int
    source: Capture | None
    stream: Stream
    ran: bool
    mark: Event | None
    edge: Event | None = None


class Handoff:
    """Orders work of one producer before work of its consumers, across streams and captures.

    The producer calls ``publish()`` on its stream behind the work; each consumer calls ``wait()`` on its own stream
    before it uses the result. Each step publishes at most once; a publication is valid in its step only.

    Args:
        streams: the device's streams.
        name: unique among them.
        producer: who publishes, in words for messages.
        consumers: who may wait. One that is not listed is refused, so neither side can be added alone.

    Attributes:
        waits: how many waits became what, for tests and reports; a replayed graph's own waits are not counted again.

    An event that a capture recorded belongs to that capture alone: each capture that publishes gets events of its own,
    which live as long as the capture, and a graph that waits on one may be replayed only in a step where the same graph
    published.
    """

    def __init__(self, streams: Streams, name: str, *, producer: str, consumers: Sequence[str]) -> None:
        if isinstance(consumers, str):
            raise HandoffError(f"handoff {name!r}: consumers is the string {consumers!r}; give a tuple of names")
        if not consumers:
            raise HandoffError(f"handoff {name!r} of producer {producer!r} has no consumer")
        streams.claim_name(name, producer)
        self.name = name
        self.producer = producer
        self.consumers = tuple(consumers)
        self.waits: Counter[WaitKind] = Counter()
        self._streams = streams
        self._external = streams.report.policy is Policy.EXTERNAL
        # External, since a capture may wait on it; recorded eagerly it is an event like any other.
        self._eager = streams.backend.new_event(external=True) if self._external else None
        self._last: _Publication | None = None

    def publish(self) -> None:
        """Mark the end of the producer's work on the current stream.

        Raises:
            HandoffError: published already in this step; on a stream that the open capture does not record.
        """
        streams, backend = self._streams, self._streams.backend
        source = streams.open_capture
        if source is None and backend.is_capturing():
            self._refuse_foreign_capture()
        self._refuse_second(source)
        mark, edge = self._eager, None
        if source is None:
            if mark is not None:
                backend.record(mark)
        else:
            if not backend.is_capturing():
                raise HandoffError(
                    f"{self._who()}: published on stream {backend.current_stream().name!r}, which {source!r} does not "
                    "record; let that stream wait for something of the capture first"
                )
            if source.closed and self._external:
                mark, edge = None, backend.new_event(external=False)
                backend.record(edge)
            elif self._external:
                # The edge comes last and so covers the external record too: a stream that joins the capture again by
                # the edge would otherwise leave that record behind as unjoined work.
                mark, edge = backend.new_event(external=True), backend.new_event(external=False)
                backend.record(mark)
                backend.record(edge)
            source.add_publish(_CapturedPublish(self, source, mark))
        self._last = _Publication(streams.step, source, backend.current_stream(), source is None, mark, edge)

    def wait(self, consumer: str | None = None) -> None:
        """Hold the current stream back until what was published in this step is done.

        Args:
            consumer: which of the consumers waits; may be left out if there is one only.
        Raises:
            HandoffError: not a declared consumer; nothing published in this step; published in a capture that was not
                replayed since.
        """
        streams, backend = self._streams, self._streams.backend
        here = streams.open_capture
        consumer = self._declared(consumer)
        if here is None and backend.is_capturing():
            self._refuse_foreign_capture()
        last = self._of_this_step(consumer)
        source = last.source
        if here is None and not last.ran:
            raise HandoffError(self._not_replayed(consumer, last))
        inside = here is not None and here is source
        if source is not None and source.closed and not inside:
            raise HandoffError(
                f"{self._who(consumer)}: published in {source!r}, which is closed, so nothing outside may wait for it; "
                "capture it with closed=False"
            )
        if not self._external:
            kind = WaitKind.WHOLE_STREAM
            if here is None or inside:  # otherwise the wait is done on the replaying stream, before each replay
                backend.wait_stream(last.stream)
        else:
            event = last.edge if inside else last.mark
            assert event is not None, f"{self._who(consumer)}: published in {source!r} without an event"
            backend.wait(event)
            if here is None:
                kind = WaitKind.EVENT if source is None else WaitKind.EXTERNAL_EVENT
            else:
                kind = WaitKind.EDGE if inside else WaitKind.EXTERNAL_NODE
        if here is not None and not inside:
            here.add_wait(_CrossingWait(self, here, source, consumer))
        self.waits[kind] += 1

    def require_published(self, consumer: str | None = None) -> None:
        """Check what ``wait`` checks and hold nothing back: for a consumer on the producer's own stream.

        Raises:
            HandoffError: as ``wait``.
        """
        consumer = self._declared(consumer)
        last = self._of_this_step(consumer)
        if self._streams.open_capture is None and not last.ran:
            raise HandoffError(self._not_replayed(consumer, last))

    def _not_replayed(self, consumer: str, last: _Publication) -> str:
        return f"{self._who(consumer)}: published in {last.source!r}, which was not replayed since, so nothing has run"

    def _declared(self, consumer: str | None) -> str:
        if consumer is None:
            if len(self.consumers) != 1:
                raise HandoffError(f"{self._who()}: has several consumers, so a wait must say which one it is")
            return self.consumers[0]
        if consumer not in self.consumers:
            raise HandoffError(f"{self._who()}: {consumer!r} waits, but is not one of its consumers; declare it")
        return consumer

    def _of_this_step(self, consumer: str) -> _Publication:
        last, step = self._last, self._streams.step
        if last is None:
            raise HandoffError(f"{self._who(consumer)}: it was never published")
        if last.step != step:
            raise HandoffError(
                f"{self._who(consumer)}: it was not published in step {step}; the last time was in step {last.step}"
            )
        return last

    def _refuse_second(self, source: Capture | None) -> None:
        last, step = self._last, self._streams.step
        if last is None or last.step != step:
            return
        # A captured publish has not happened; the replay that follows makes it happen.
        if last.ran or source is last.source:
            where = "eagerly" if last.source is None else f"in {last.source!r}"
            raise HandoffError(f"{self._who()}: published twice in step {step}, the first time {where}")

    def _refuse_foreign_capture(self) -> NoReturn:
        """A capture that this handoff's ``Streams`` did not begin would hold it without anybody knowing."""
        raise HandoffError(
            f"{self._who()}: used on stream {self._streams.backend.current_stream().name!r}, which a capture "
            "records that other Streams began; a handoff belongs to the Streams it was made with"
        )

    def _who(self, consumer: str | None = None) -> str:
        waiting = repr(consumer) if consumer else " and ".join(map(repr, self.consumers))
        return f"handoff {self.name!r} from {self.producer!r} to {waiting}"


@dataclass(frozen=True, slots=True)
class _CapturedPublish:
    """A publish held by a graph, and with it the event that the graph records."""

    handoff: Handoff
    source: Capture
    mark: Event | None

    @property
    def handoff_name(self) -> str:
        return self.handoff.name

    def before_replay(self) -> None:
        handoff = self.handoff
        last = handoff._last
        if last is not None and last.ran:
            handoff._refuse_second(self.source)

    def after_replay(self) -> None:
        streams = self.handoff._streams
        stream = streams.backend.current_stream()
        self.handoff._last = _Publication(streams.step, self.source, stream, True, self.mark)


@dataclass(frozen=True, slots=True)
class _CrossingWait:
    """A wait held by a graph on a publish outside of it."""

    handoff: Handoff
    waiting: Capture
    source: Capture | None
    consumer: str

    @property
    def handoff_name(self) -> str:
        return self.handoff.name

    def before_replay(self) -> None:
        handoff = self.handoff
        last = handoff._of_this_step(self.consumer)
        if last.source is not self.source or not last.ran:
            captured = "eagerly" if self.source is None else f"by {self.source!r}"
            now = "eagerly" if last.source is None else f"by {last.source!r}{'' if last.ran else ', not replayed yet'}"
            raise HandoffError(
                f"{handoff._who(self.consumer)}: {self.waiting!r} waits for what is published {captured}, "
                f"but step {handoff._streams.step} published {now}"
            )
        if not handoff._external:
            handoff._streams.backend.wait_stream(last.stream)
