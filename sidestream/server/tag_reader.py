"""Reads text that arrives in pieces up to tags, holding back no more than what may still become one."""

from __future__ import annotations

from collections.abc import Callable, Generator

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What stands for the bytes of a character that was cut."""
Reading = Generator[None, None, tuple[str, str | None]]
"""Yields whenever more text is needed; returns the text before the tag, and the tag, None if all text ended first."""


class TagReader:
    """A buffer between whoever brings text and a generator that consumes it."""

    def __init__(self) -> None:
        self._buffer = ""
        self._ended = False

    def feed(self, text: str) -> None:
        self._buffer += text

    def end(self) -> None:
        """No more text will come."""
        self._ended = True

    def until(self, *tags: str, show: Callable[[str], None] | None = None, whole: bool = False) -> Reading:
        """Read to the first of some tags, of which none begins another; without tags, to the end.

        Args:
            show: gets the text as soon as it cannot be part of a tag; the text returned is empty then.
            whole: leave out what may begin a tag if all text ends there.
        """
        collected = ""
        while True:
            place, tag = self._first(tags)
            if tag is None:
                place = len(self._buffer) - (self._held(tags) if whole or not self._ended else 0)
            head = self._buffer[:place]
            self._buffer = "" if self._ended and tag is None else self._buffer[len(head) + len(tag or "") :]
            if show is not None and head:
                show(head)
            elif show is None:
                collected += head
            if tag is not None or self._ended:
                return collected, tag
            yield

    def skip_space(self) -> Generator[None, None, None]:
        """Drop white space up to the next other character."""
        while True:
            self._buffer = self._buffer.lstrip()
            if self._buffer or self._ended:
                return
            yield

    def takes(self, text: str) -> Generator[None, None, bool]:
        """Drop ``text`` and white space before it, if that comes next; whether it did."""
        while text.startswith(next_text := self._buffer.lstrip()) and next_text != text and not self._ended:
            yield
        if not next_text.startswith(text):
            return False
        self._buffer = next_text[len(text) :]
        return True

    def _first(self, tags: tuple[str, ...]) -> tuple[int, str | None]:
        """Place of the first tag in the buffer, and which it is."""
        found = [(self._buffer.find(tag), tag) for tag in tags]
        found = [(place, tag) for place, tag in found if place >= 0]
        if not found:
            return 0, None
        return min(found)

    def _held(self, tags: tuple[str, ...]) -> int:
        """Characters at the end of the buffer that begin some tag, whose last may be cut itself."""
        text = self._buffer.rstrip(REPLACEMENT)
        longest = min(len(text), max(map(len, tags), default=1) - 1)
        begun = next((n for n in range(longest, 0, -1) if any(tag.startswith(text[-n:]) for tag in tags)), 0)
        return begun + len(self._buffer) - len(text) if begun else 0
