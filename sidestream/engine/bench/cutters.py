"""Ways to cut text to a number of tokens: with the model's tokenizer, or by how many tokens a character has."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sidestream.engine.bench.text_source import TextSource
from sidestream.errors import ConfigError

CHARACTERS_A_TOKEN = 5
MOST_COUNTS = 24
"""Of one text, before the closest is taken."""


class TokenizerCutter:
    """Cuts with a transformers tokenizer, special tokens counted: never more tokens than asked, seldom fewer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def cut(self, source: TextSource, number: int, tokens: int) -> str:
        characters = CHARACTERS_A_TOKEN * tokens
        while len(ids := self._ids(source.passage(number, characters))) <= tokens:
            characters *= 2
        keep = tokens
        while keep > 0:
            text = str(self._tokenizer.decode(ids[:keep], skip_special_tokens=True)).rstrip("\ufffd")
            over = len(self._ids(text)) - tokens if text else 0
            if text and over <= 0:
                return text
            keep -= max(1, over)
        raise ConfigError(f"input_len is {tokens}, and no text has so few tokens with this tokenizer")

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text).input_ids)


class CountingCutter:
    """Cuts by counting: never more tokens than asked, and fewer only where no beginning of the text has so many.

    Args:
        count: tokens of the prompt that a text makes.
    """

    def __init__(self, count: Callable[[str], int]) -> None:
        self._count = count
        self._characters_a_token = float(CHARACTERS_A_TOKEN)

    def cut(self, source: TextSource, number: int, tokens: int) -> str:
        low, low_tokens, high = 0, 0, math.inf
        best = ""
        characters = max(1, round(tokens * self._characters_a_token))
        for tried in range(MOST_COUNTS):
            text = source.passage(number, characters)[:characters]
            found = self._count(text)
            if found <= tokens:
                best, low, low_tokens = text, characters, found
            else:
                high = characters
            if found == tokens or high - low <= 1:
                break
            step = (tokens - found) * self._characters_a_token
            characters += int(math.copysign(max(1, round(abs(step))), step))
            if not low < characters < high or (tried >= MOST_COUNTS // 3 and high < math.inf):
                characters = int(low + high) // 2 if high < math.inf else 2 * low
        if not best:
            raise ConfigError(f"input_len is {tokens}, and no prompt of this server has so few tokens")
        self._characters_a_token = low / max(1, low_tokens)
        return best


@dataclass(frozen=True, slots=True)
class RatioCutter:
    """Cuts without a tokenizer, at a word's end where that costs few characters.

    Attributes:
        tokens_a_character: of the text.
        extra: tokens of every prompt beside its text: special ones, a chat template's.
    """

    tokens_a_character: float
    extra: float = 0.0

    @classmethod
    def fitted(cls, short: tuple[int, int], long: tuple[int, int]) -> RatioCutter:
        """Through two prompts, each (characters, tokens) as a server counted them.

        Raises:
            ConfigError: the longer one has no more tokens.
        """
        (a, x), (b, y) = short, long
        if y <= x:
            raise ConfigError(f"the server counts {x} tokens for {a} characters and {y} for {b}; give --tokenizer")
        ratio = (y - x) / (b - a)
        return cls(ratio, max(0.0, x - ratio * a))

    def cut(self, source: TextSource, number: int, tokens: int) -> str:
        characters = math.floor((tokens - self.extra) / self.tokens_a_character + 0.5)
        if characters < 1:
            raise ConfigError(f"input_len is {tokens}; this server adds about {self.extra:.0f} tokens to every prompt")
        text = source.passage(number, characters)[:characters]
        head, _, tail = text.rpartition(" ")
        return head if head and len(tail) < characters // 8 else text
