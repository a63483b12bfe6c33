"""Eager breaks: places where a capture may be interrupted so that Python runs there, at capture and at every replay.

Code that shall be a break is marked here; ``sidestream.graphs`` records. It needs ``sidestream.errors`` only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, Protocol, overload

from sidestream.errors import GraphError

P = ParamSpec("P")


class BreakRecorder(Protocol):
    """A capture that can be interrupted."""

    def add_eager(self, body: Callable[[], None], *, name: str) -> None:
        """End the segment, run ``body`` now and at every replay in this place, begin the next segment."""
        ...


_RECORDER: ContextVar[BreakRecorder | None] = ContextVar("sidestream_break_recorder", default=None)


@contextmanager
def recording_breaks(recorder: BreakRecorder | None) -> Iterator[None]:
    """Inside the block, breaks go to ``recorder``; None makes them plain calls."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


@overload
def eager_break_during_capture(function: Callable[P, None], *, name: str | None = None) -> Callable[P, None]: ...


@overload
def eager_break_during_capture(*, name: str | None = None) -> Callable[[Callable[P, None]], Callable[P, None]]: ...


def eager_break_during_capture(
    function: Callable[P, None] | None = None, *, name: str | None = None
) -> Callable[P, None] | Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorator, with or without arguments: inside a breakable capture a call of ``function`` is an eager break;
    elsewhere it is a plain call.

    At capture the segment so far is ended and replayed, so the body sees real values; then it runs, on the stream
    that captures, and the next segment begins. At each replay it runs again in its place with the same arguments:
    tensors among them, and what it writes its results to, must be static buffers. A break inside a break is a plain
    call.

    Args:
        function: returns None, since what it returned could not reach a captured segment.
        name: for messages; the function's own by default.
    Raises:
        GraphError: a call returned something.
    """
    if function is None:
        return functools.partial(eager_break_during_capture, name=name)
    label = name or function.__qualname__

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        recorder = _RECORDER.get()
        body = functools.partial(_without_result, label, function, *args, **kwargs)
        if recorder is None:
            body()
        else:
            recorder.add_eager(body, name=label)

    return call


def _without_result(label: str, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    result: object = function(*args, **kwargs)  # type: ignore[func-returns-value]
    if result is not None:
        raise GraphError(
            f"break {label!r} returned a {type(result).__name__}, which no captured segment could see; write it to a "
            "static buffer"
        )
