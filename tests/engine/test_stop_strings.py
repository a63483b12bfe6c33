import sys
from types import FrameType

from hypothesis import given
from hypothesis import strategies as st

from sidestream.engine.stop_strings import StopStrings

texts = st.text(alphabet="ab ", max_size=40)
pieces = st.lists(st.text(alphabet="ab ", max_size=4), max_size=20)
stop_lists = st.lists(st.text(alphabet="ab ", min_size=1, max_size=5), max_size=4)


def expected(chunks: list[str], stops: list[str], include: bool, skip: int) -> tuple[str, str | None]:
    """Brute force: after each piece past ``skip``, look for every stop string that ends in it."""
    text = ""
    for number, piece in enumerate(chunks, start=1):
        old, text = len(text), text + piece
        found = [
            (start, order, stop)
            for order, stop in enumerate(stops)
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > old
        ]
        if found and number > skip:
            start, _, stop = min(found)
            return text[: start + len(stop) if include else start], stop
    return text, None


@given(pieces, stop_lists, st.booleans(), st.integers(0, 3))
def test_pieces_cut_as_brute_force_cuts(chunks: list[str], stops: list[str], include: bool, skip: int) -> None:
    filter_ = StopStrings(stops, include=include)
    want, matched = expected(chunks, stops, include, skip)
    shown = ""
    for number, piece in enumerate(chunks, start=1):
        shown += filter_.push(piece, may_stop=number > skip)
        assert want.startswith(shown), "something was shown that the text does not have"
        if filter_.matched is not None:
            break
    shown += filter_.flush()
    assert (shown, filter_.matched) == (want, matched)


@given(pieces, stop_lists)
def test_no_more_is_held_back_than_could_become_a_stop_string(chunks: list[str], stops: list[str]) -> None:
    filter_ = StopStrings(stops, include=False)
    text = shown = ""
    for piece in chunks:
        text += piece
        shown += filter_.push(piece, may_stop=True)
        if filter_.matched is not None:
            return
        held = text[len(shown) :]
        longest = max((n for s in stops for n in range(len(s)) if text.endswith(s[:n])), default=0)
        assert len(held) == longest


def test_the_earliest_start_wins_then_the_first_listed() -> None:
    filter_ = StopStrings(["cd", "abcdef", "abc"], include=True)
    assert filter_.push("xabcdefg", may_stop=True) == "xabcdef"
    assert filter_.matched == "abcdef"


def lines_run(count: int) -> int:
    """Lines of Python that ``count`` pushes against long patterns execute."""
    filter_ = StopStrings(["a" * 2_000 + chr(ord("b") + i) for i in range(8)], include=False)
    lines = 0

    def trace(_frame: FrameType, event: str, _arg: object) -> object:
        nonlocal lines
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        shown = sum(len(filter_.push("a", may_stop=True)) for _ in range(count))
    finally:
        sys.settrace(None)
    assert shown == count - 2_000
    return lines


def test_work_is_linear_with_many_long_patterns() -> None:
    assert lines_run(8_000) < 2.5 * lines_run(4_000)
