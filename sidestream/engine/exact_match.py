"""Few-shot exact match on questions in GSM8K's format: prompts, the final answer in a text, the score."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidestream.engine.json_lines import read_json_lines
from sidestream.errors import RequestError

MARK = "####"
NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")
STOP = ("Question:",)
"""Begins the next question, if a model goes on by itself."""


@dataclass(frozen=True, slots=True)
class Item:
    """A question with its worked answer, which ends with ``#### NUMBER``.

    Attributes:
        final: that number, normalised.
    """

    question: str
    answer: str
    final: str


@dataclass(frozen=True, slots=True)
class Judged:
    """An item with what was answered; ``found`` is None where no final answer stands."""

    item: Item
    text: str
    found: str | None

    @property
    def correct(self) -> bool:
        return self.found == self.item.final

    def as_json(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "question": self.item.question,
            "expected": self.item.final,
            "found": self.found,
            "correct": self.correct,
            "text": self.text,
        }


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of all items: right answers, and texts without a final answer, which count as wrong."""

    items: int
    correct: int
    invalid: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.items

    @property
    def invalid_rate(self) -> float:
        return self.invalid / self.items


def read_items(path: Path) -> list[Item]:
    """Items of a JSON Lines file of ``question`` and ``answer``.

    Raises:
        RequestError: naming the line and what is wrong with it.
    """
    items = []
    for place, entry in read_json_lines(path, of="questions"):
        question, answer = (entry.get(key) if isinstance(entry, dict) else None for key in ("question", "answer"))
        if not (isinstance(question, str) and question and isinstance(answer, str)):
            raise RequestError(f"{place} needs 'question' and 'answer', which are text")
        final = final_answer(answer)
        if final is None:
            raise RequestError(f"{place}: no number stands behind {MARK!r} in the answer")
        items.append(Item(question, answer, final))
    return items


def final_answer(text: str) -> str | None:
    """The first number behind ``####``, without thousands separators and without a fraction that is zero."""
    _, mark, rest = text.partition(MARK)
    match = NUMBER.match(rest.strip().lstrip("$")) if mark else None
    if match is None:
        return None
    whole, _, fraction = match[0].replace(",", "").partition(".")
    return whole if not fraction.strip("0") else f"{whole}.{fraction.rstrip('0')}"


def examples_for(question: str, source: Sequence[Item], count: int) -> list[Item]:
    """The first ``count`` items of ``source`` that ask something else.

    Raises:
        RequestError: there are not so many.
    """
    asked = _same(question)
    found = list(itertools.islice((item for item in source if _same(item.question) != asked), count))
    if len(found) < count:
        raise RequestError(
            f"shots is {count}, the limit is {len(found)}, the examples beside the question {question[:60]!r}"
        )
    return found


def _same(question: str) -> str:
    """Equal for questions that differ in nothing but case and white space."""
    return " ".join(question.split()).casefold()


def plain_prompt(shots: Sequence[Item], question: str) -> str:
    """Worked examples, then the question."""
    worked = "".join(f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in shots)
    return f"{worked}Question: {question}\nAnswer:"


def chat_prompt(shots: Sequence[Item], question: str) -> list[dict[str, str]]:
    """The same as a conversation."""
    messages = []
    for shot in shots:
        messages.append({"role": "user", "content": shot.question})
        messages.append({"role": "assistant", "content": shot.answer})
    return [*messages, {"role": "user", "content": question}]


def judge(item: Item, text: str) -> Judged:
    return Judged(item, text, final_answer(text))


def score(judged: Sequence[Judged]) -> Score:
    return Score(
        items=len(judged),
        correct=sum(entry.correct for entry in judged),
        invalid=sum(entry.found is None for entry in judged),
    )
