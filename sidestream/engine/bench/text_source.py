"""Text for prompts: passages of real text, or of made-up words that can be pronounced."""

from __future__ import annotations

import json
import random
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from sidestream.errors import ConfigError

ONSETS = ("b", "br", "d", "f", "g", "gr", "h", "k", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "tr", "v", "z")
VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
ENDS = ("", "", "", "l", "m", "n", "r", "s", "t")


class TextSource(Protocol):
    """Numbered passages of text, the same for the same seed."""

    def passage(self, number: int, characters: int) -> str:
        """At least so many characters. A longer passage begins as a shorter one of the same number does."""


class Prose:
    """Passages of one text. Each begins at a word of its own while there are such, and goes on at the text's start.

    Args:
        name: of the text, for messages.
    Raises:
        ConfigError: the text has no words.
    """

    def __init__(self, text: str, *, name: str, seed: int) -> None:
        self._text = text.strip() + "\n\n"
        spaced = f" {self._text}"
        self._starts = [i for i, (a, b) in enumerate(pairwise(spaced)) if a.isspace() and not b.isspace()]
        if not self._starts:
            raise ConfigError(f"the dataset {name} holds no words")
        random.Random(seed).shuffle(self._starts)

    def passage(self, number: int, characters: int) -> str:
        start = self._starts[number % len(self._starts)]
        times = (start + characters) // len(self._text) + 1
        return (self._text * times)[start:] if times > 1 else self._text[start : start + characters]


class MadeUpWords:
    """Sentences of made-up words, which a tokenizer cuts into a few tokens each."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def passage(self, number: int, characters: int) -> str:
        rng = random.Random(f"{self._seed}/{number}")
        text = ""
        while len(text) < characters:
            words = [_word(rng) for _ in range(rng.randint(4, 12))]
            text += " ".join(words).capitalize() + ". "
        return text


def _word(rng: random.Random) -> str:
    syllables = range(rng.choice((1, 2, 2, 3)))
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(ENDS) for _ in syllables)


def bundled_text() -> str:
    """Questions, notes and worked answers that ship with Sidestream."""
    assets = resources.files("sidestream") / "assets"
    lines = [json.loads(line) for line in (assets / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    worked = [json.loads(line) for line in (assets / "arithmetic.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = [line["prompt"] + line["answer"] for line in lines]
    return "\n\n".join(texts + [f"{line['question']}\n{line['answer']}" for line in worked])


def text_of_file(path: Path) -> str:
    """A text file in UTF-8.

    Raises:
        ConfigError: it cannot be read, or is not text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the dataset {path} as UTF-8 text: {error}") from None
