"""Marking code as an eager break: what reaches the recorder, and that it is a plain call without one."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import pytest

from sidestream.core.eager_break import eager_break_during_capture, recording_breaks
from sidestream.errors import GraphError


class Recorder:
    """Keeps what it is given and runs nothing."""

    def __init__(self) -> None:
        self.given: list[tuple[str, Callable[[], None]]] = []

    def add_eager(self, body: Callable[[], None], *, name: str) -> None:
        self.given.append((name, body))


calls: list[tuple[int, int]] = []


@eager_break_during_capture
def marked(a: int, *, b: int = 0) -> None:
    """Its documentation."""
    calls.append((a, b))


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


def test_without_a_recorder_it_is_a_plain_call() -> None:
    marked(1, b=2)
    assert calls == [(1, 2)]
    assert (marked.__name__, marked.__doc__) == ("marked", "Its documentation.")


def test_a_recorder_gets_the_call_with_its_arguments_instead() -> None:
    recorder = Recorder()
    with recording_breaks(recorder):
        marked(1, b=2)
        marked(3)
    assert calls == []
    assert [name for name, _ in recorder.given] == ["marked", "marked"]
    for _, body in recorder.given * 2:
        body()
    assert calls == [(1, 2), (3, 0)] * 2


def test_a_name_of_its_own_and_methods() -> None:
    class Layer:
        def __init__(self) -> None:
            self.ran = 0

        @eager_break_during_capture
        def run(self) -> None:
            self.ran += 1

    recorder, layer = Recorder(), Layer()
    with recording_breaks(recorder):
        eager_break_during_capture(layer.run, name="outer")()
        layer.run()
    names = [name for name, _ in recorder.given]
    assert names[0] == "outer"
    assert names[1].endswith("Layer.run")
    recorder.given[1][1]()
    assert layer.ran == 1


def test_the_innermost_recorder_counts_and_none_switches_off() -> None:
    outer, inner = Recorder(), Recorder()
    with recording_breaks(outer):
        with recording_breaks(inner):
            marked(1)
        with recording_breaks(None):
            marked(2)
        marked(3)
    assert (len(inner.given), len(outer.given), calls) == (1, 1, [(2, 0)])


def test_an_error_inside_the_block_ends_the_recording() -> None:
    recorder = Recorder()
    with pytest.raises(KeyError), recording_breaks(recorder):
        raise KeyError
    marked(1)
    assert (recorder.given, calls) == ([], [(1, 0)])


def test_another_thread_is_not_recorded() -> None:
    """Only the thread that captures is interrupted by breaks; a tokenizer beside it, say, is not."""
    recorder = Recorder()
    with recording_breaks(recorder):
        thread = Thread(target=marked, args=(1,))
        thread.start()
        thread.join()
    assert (recorder.given, calls) == ([], [(1, 0)])


def test_a_break_that_returns_something_is_told_so() -> None:
    @eager_break_during_capture
    def gives() -> int:  # type: ignore[arg-type]
        return 3

    with pytest.raises(GraphError, match=r"gives' returned a int, .* static buffer"):
        gives()


def test_a_name_can_be_given_where_the_function_is_marked() -> None:
    @eager_break_during_capture(name="attention of layer 3")
    def attend(seen: list[int]) -> None:
        seen.append(1)

    recorder, seen = Recorder(), list[int]()
    with recording_breaks(recorder):
        attend(seen)
    assert [name for name, _ in recorder.given] == ["attention of layer 3"]
