"""What a chat answer consists of, and the parser that takes generated text apart into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a tool call's arguments, as JSON text; the pieces of a call joined are one JSON object."""

    index: int
    text: str


Piece: TypeAlias = Content | Reasoning | CallStart | CallArguments


class AnswerParser(Protocol):
    """Takes text as it comes. However the text is cut, the pieces joined are the same."""

    def push(self, text: str) -> list[Piece]:
        """Take more text; what can be told apart already."""
        ...

    def finish(self) -> list[Piece]:
        """The rest: no more text will come."""
        ...


class PlainParser:
    """All text is content."""

    def push(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        return []
