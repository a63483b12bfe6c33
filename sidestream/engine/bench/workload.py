"""A workload: prompts of the lengths that were asked for, and how many tokens each answer has."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sidestream.engine.bench.text_source import MadeUpWords, Prose, TextSource, bundled_text, text_of_file
from sidestream.errors import ConfigError

DATASETS = ("prose", "synthetic", "random-ids")
DEFAULT_NUM_PROMPTS = 64
DEFAULT_INPUT_LEN = 256
DEFAULT_OUTPUT_LEN = 64
FIRST_TOKEN = 5
"""Random prompts hold no smaller token ids: those are special ones in most vocabularies."""


class Cutter(Protocol):
    """Cuts text to a number of tokens."""

    def cut(self, source: TextSource, number: int, tokens: int) -> str:
        """The beginning of a passage that has so many tokens, or as close to it as can be told.

        Raises:
            ConfigError: no text has so few tokens.
        """


@dataclass(frozen=True, slots=True)
class Job:
    """One request: text or token ids, and the tokens of its answer."""

    prompt: str | tuple[int, ...]
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked.

    Attributes:
        dataset: one of ``DATASETS``, or the path of a text file.
        input_len, output_len: tokens of a prompt and of its answer.
        range_ratio: each length is drawn between ``(1 - range_ratio)`` and ``(1 + range_ratio)`` times that, uniformly.
        seed: of lengths and prompts.
    Raises:
        ConfigError: naming the option, its value and what is allowed.
    """

    dataset: str = "prose"
    num_prompts: int = DEFAULT_NUM_PROMPTS
    input_len: int = DEFAULT_INPUT_LEN
    output_len: int = DEFAULT_OUTPUT_LEN
    range_ratio: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, at least 1 is needed")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"range_ratio is {self.range_ratio}, allowed is 0 up to, but not, 1")
        if self.dataset not in DATASETS and not Path(self.dataset).is_file():
            raise ConfigError(f"dataset is {self.dataset!r}; allowed are {', '.join(DATASETS)}, or a text file's path")

    @property
    def longest_input(self) -> int:
        return max(_bounds(self.input_len, self.range_ratio))

    @property
    def longest_output(self) -> int:
        return max(_bounds(self.output_len, self.range_ratio))

    def source(self) -> TextSource:
        """The text behind the dataset; there is none behind random ids."""
        assert self.dataset != "random-ids"
        if self.dataset == "synthetic":
            return MadeUpWords(seed=self.seed)
        text = bundled_text() if self.dataset == "prose" else text_of_file(Path(self.dataset))
        return Prose(text, name=self.dataset, seed=self.seed)

    def jobs(self, *, cutter: Cutter | None, vocab_size: int | None, warm_ups: int = 0) -> tuple[list[Job], list[Job]]:
        """Jobs to warm up with, and those to measure; no prompt stands in both.

        Args:
            cutter: of text; not needed for random ids.
            vocab_size: of random ids; not needed for text.
        """
        rng = random.Random(self.seed)
        inputs, outputs = (_bounds(length, self.range_ratio) for length in (self.input_len, self.output_len))
        lengths = [(rng.randint(*inputs), rng.randint(*outputs)) for _ in range(self.num_prompts + warm_ups)]
        prompts: Iterable[str | tuple[int, ...]] = self._texts(lengths, cutter)
        if self.dataset == "random-ids":
            prompts = self._ids(lengths, vocab_size)
        jobs = [Job(prompt, output) for prompt, (_, output) in zip(prompts, lengths, strict=True)]
        return jobs[self.num_prompts :], jobs[: self.num_prompts]

    def _texts(self, lengths: list[tuple[int, int]], cutter: Cutter | None) -> Iterator[str]:
        assert cutter is not None
        source = self.source()
        for number, (tokens, _) in enumerate(lengths):
            yield cutter.cut(source, number, tokens)

    def _ids(self, lengths: list[tuple[int, int]], vocab_size: int | None) -> Iterator[tuple[int, ...]]:
        assert vocab_size is not None
        if vocab_size <= FIRST_TOKEN:
            raise ConfigError(f"vocab_size is {vocab_size}, more than {FIRST_TOKEN} is needed for random ids")
        for number, (tokens, _) in enumerate(lengths):
            rng = random.Random(f"{self.seed}/{number}")
            yield tuple(rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(tokens))

    def as_json(self) -> dict[str, Any]:
        return {
            "dataset": self.dataset if self.dataset in DATASETS else Path(self.dataset).name,
            "num_prompts": self.num_prompts,
            "input_len": self.input_len,
            "output_len": self.output_len,
            "range_ratio": self.range_ratio,
            "seed": self.seed,
        }


def _bounds(length: int, ratio: float) -> tuple[int, int]:
    low, high = max(1, math.ceil(length * (1 - ratio))), math.floor(length * (1 + ratio))
    return min(low, length), max(high, length)
