"""Finds stop strings in text that arrives in pieces, and holds back what may still turn into one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Filter between the text that a sequence makes and the text that is shown.

    The text ends with the first piece that completes a stop string. Of those that it completes, the one that starts
    earliest in the text counts, of two with one start the one listed first. Work is linear in the text.

    Args:
        stops: non-empty strings.
        include: show the stop string itself; else the text ends before it.

    Attributes:
        matched: the stop string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._matchers = [_Matcher(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_stop: bool) -> str:
        """Take new text, return what can be shown.

        Args:
            may_stop: a stop string that ends in this text counts; without it (before ``min_tokens``) it is passed by.
        """
        assert self.matched is None, f"text after the stop string {self.matched!r}"
        before = self._held
        whole = before + text
        first: tuple[int, int, _Matcher] | None = None
        for matcher in self._matchers:
            end = matcher.advance(text)
            if end is not None and may_stop:
                start = len(before) + end - len(matcher.pattern)
                if first is None or start < first[0]:
                    first = (start, len(before) + end, matcher)
        if first is not None:
            self.matched = first[2].pattern
            self._held = ""
            return whole[: first[1] if self._include else first[0]]
        hold = 0 if self._include else max((matcher.state for matcher in self._matchers), default=0)
        shown = len(whole) - hold
        self._held = whole[shown:]
        return whole[:shown]

    def flush(self) -> str:
        """The text still held: no more will come."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Knuth, Morris and Pratt's: ``state`` is how many characters at the end of the text begin the pattern."""

    __slots__ = ("_fallback", "pattern", "state")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        fallback = [0] * (len(pattern) + 1)  # state after i matched characters, if the next one does not fit
        state = 0
        for i in range(1, len(pattern)):
            while state and pattern[i] != pattern[state]:
                state = fallback[state]
            state += pattern[i] == pattern[state]
            fallback[i + 1] = state
        self._fallback = fallback

    def advance(self, text: str) -> int | None:
        """Read all of the text; the end of the first occurrence that it completes."""
        pattern, fallback, state = self.pattern, self._fallback, self.state
        found = None
        for i, char in enumerate(text):
            while state and char != pattern[state]:
                state = fallback[state]
            if char == pattern[state]:
                state += 1
                if state == len(pattern):
                    found = i + 1 if found is None else found
                    state = fallback[state]
        self.state = state
        return found
