"""A capture that is broken into segments, with eager Python between them: what PIECEWISE mode runs.

Usable alone: needs ``sidestream.streams``, ``sidestream.core.eager_break`` and torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from sidestream.core.eager_break import recording_breaks
from sidestream.errors import GraphError
from sidestream.streams import Capture, Stream, Streams


@dataclass(frozen=True, slots=True)
class EagerBreak:
    """Python between two segments."""

    name: str
    body: Callable[[], None]


class BreakableCUDAGraphCapture:
    """Records the ``with`` block as graph segments and eager breaks, then replays both in order.

    Work inside the block is recorded into a segment until ``add_eager`` (or a call marked with
    ``eager_break_during_capture``) ends it. Each segment is replayed once as soon as it is closed: a capture is a real
    step, so bodies see real values, and external events that they wait for have been recorded. Give it inputs that
    may be computed on (scratch).

    Args:
        streams: of the device; the block runs on the stream that is current.
        name: for messages.
        pool: memory pool from ``backend.new_pool()`` that several captures may share, largest first.
        inputs: static tensors that replays will read, by name; ``replay`` can check that they did not move.
    """

    def __init__(
        self, streams: Streams, name: str, *, pool: Any = None, inputs: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self.name = name
        self._streams = streams
        self._pool = streams.backend.new_pool() if pool is None else pool
        self._addresses = {key: tensor.data_ptr() for key, tensor in (inputs or {}).items()}
        self._parts: list[Capture | EagerBreak] = []
        self._stream: Stream | None = None
        self._open: AbstractContextManager[Capture] | None = None
        self._recording: AbstractContextManager[None] | None = None
        self._state = "new"

    # Introspection

    @property
    def segments(self) -> tuple[Capture, ...]:
        """In order of their replay."""
        return tuple(part for part in self._parts if isinstance(part, Capture))

    @property
    def breaks(self) -> tuple[str, ...]:
        """Names of the eager breaks in order; break i runs behind segment i."""
        return tuple(part.name for part in self._parts if isinstance(part, EagerBreak))

    # Capture

    def __enter__(self) -> BreakableCUDAGraphCapture:
        if self._state != "new":
            raise GraphError(f"capture {self.name!r} is {self._state}; make another one")
        self._state = "open"
        self._stream = self._streams.backend.current_stream()
        self._recording = recording_breaks(self)
        self._recording.__enter__()
        try:
            self._begin_segment()
        except BaseException as failure:
            self._abandon(failure)
            raise
        return self

    def add_eager(self, body: Callable[[], None], *, name: str) -> None:
        """End the segment, run ``body`` now and at every replay in this place, begin the next segment.

        Args:
            body: reads and writes static buffers only; runs on the stream that captures.
        Raises:
            GraphError: no segment is open, or the current stream is not the one that captures.
        """
        if self._open is None:
            raise GraphError(f"break {name!r} outside of a segment of capture {self.name!r}")
        here = self._streams.backend.current_stream()
        if here is not self._stream:  # ending a capture from another stream would leave it open on its own
            raise GraphError(f"break {name!r} is called on stream {here.name!r}, which does not capture {self.name!r}")
        self._end_segment()
        part = EagerBreak(name, body)
        self._parts.append(part)
        with recording_breaks(None):
            body()
        left = self._streams.backend.current_stream()
        if left is not self._stream:
            raise GraphError(f"break {name!r} left stream {left.name!r} current; it must return on {here.name!r}")
        self._begin_segment()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(f"in {self._place()} of capture {self.name!r}")
            self._abandon(error)
            return
        try:
            self._end_segment()
        except BaseException as failure:
            failure.add_note(f"in {self._place()} of capture {self.name!r}")
            self._abandon(failure)
            raise
        self._leave("ready")

    def _begin_segment(self) -> None:
        opened = self._streams.capture(f"{self.name}, segment {len(self.segments)}", pool=self._pool)
        self._parts.append(opened.__enter__())
        self._open = opened

    def _end_segment(self) -> None:
        segment, opened, self._open = self._parts[-1], self._open, None
        if opened is None:
            raise GraphError(f"capture {self.name!r} has no open segment: an error ended it, and the block went on")
        assert isinstance(segment, Capture)
        opened.__exit__(None, None, None)
        segment.replay()

    def _abandon(self, error: BaseException) -> None:
        """Leave nothing half open."""
        opened, self._open = self._open, None
        try:
            if opened is not None:
                opened.__exit__(type(error), error, error.__traceback__)  # its caller is raising the error already
        finally:
            self._parts.clear()
            self._leave("failed")

    def _leave(self, state: str) -> None:
        self._state = state
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.__exit__(None, None, None)

    def _place(self) -> str:
        number = len(self.segments)
        behind = f", behind break {self.breaks[-1]!r}" if self.breaks else ""
        if self._parts and isinstance(self._parts[-1], EagerBreak):
            return f"break {self.breaks[-1]!r} behind segment {number - 1}"
        return f"segment {number - 1}{behind}"

    # Replay

    def replay(self, inputs: Mapping[str, torch.Tensor] | None = None) -> None:
        """Launch the segments on the current stream and run the breaks between them.

        Args:
            inputs: this step's input tensors, to be compared with those of the capture; None spares that.
        Raises:
            GraphError: the capture is not complete, or an input lies elsewhere than at capture, so that the graphs
                would read stale memory.
        """
        if self._state != "ready":
            raise GraphError(f"capture {self.name!r} is {self._state} and cannot be replayed")
        if inputs is not None:
            check_addresses(self.name, self._addresses, inputs)
        for part in self._parts:
            if isinstance(part, EagerBreak):
                try:
                    part.body()
                except BaseException as error:
                    error.add_note(f"in eager break {part.name!r} of capture {self.name!r}")
                    raise
            else:
                part.replay()

    def __repr__(self) -> str:
        return f"BreakableCUDAGraphCapture({self.name!r}, {len(self.segments)} segments, {self._state})"


def check_addresses(name: str, captured: Mapping[str, int], inputs: Mapping[str, torch.Tensor]) -> None:
    """Compare the addresses of a step's inputs with those that a graph was captured with.

    Raises:
        GraphError: naming every input that moved, is missing or is new.
    """
    moved = [key for key, tensor in inputs.items() if captured.get(key) != tensor.data_ptr()]
    moved += [key for key in captured if key not in inputs]
    if moved:
        raise GraphError(
            f"graph {name!r} reads {', '.join(map(repr, sorted(moved)))} at the address it was captured with, "
            "but this step's tensor is not there; copy inputs into the static buffers instead of replacing them"
        )
