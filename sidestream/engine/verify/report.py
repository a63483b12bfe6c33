"""A verification as plain data, without torch: the cells of the matrix and what came of them, for table and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Prefill(StrEnum):
    """How prompts are computed."""

    ONE_SHOT = "one shot"
    CHUNKED = "chunked"


class Batching(StrEnum):
    """How many prompts run at once."""

    ALONE = "alone"
    BATCHED = "batched"


@dataclass(frozen=True, slots=True)
class Schedule:
    """What decides which tokens share a step. A further axis is one more field."""

    prefill: Prefill
    batching: Batching

    def __str__(self) -> str:
        return f"{self.prefill}, {self.batching}"


SCHEDULES = tuple(Schedule(prefill, batching) for prefill in Prefill for batching in Batching)
"""The first one is what all others are compared with."""


class Rule(StrEnum):
    """What a cell must have in common with the cell that it is compared with."""

    REFERENCE = "reference"
    """Nothing: it is compared with none."""
    BITWISE = "bitwise"
    """Every token and every bit of its log-probability."""
    BOUND = "bound"
    """Tokens may differ where two are nearly as likely; log-probabilities up to there differ by less than the bound."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the rerun with recorded layers first differs; ``text`` says it in words.

    Attributes:
        step: counted in generated tokens from 0; negative for prompt tokens before the last. None if nothing differs.
        layer: None if no layer differs.
    """

    text: str
    step: int | None = None
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step of one prompt that breaks the rule.

    Attributes:
        step: generated token, from 0.
        tokens: of the reference and of this cell.
        logprobs: of those tokens.
        margin: between the two most likely tokens of the reference.
        place: the layer, where a rerun was made.
    """

    prompt: int
    step: int
    tokens: tuple[int, int]
    logprobs: tuple[float, float]
    margin: float
    place: Place | None = None

    def __str__(self) -> str:
        what = (
            f"token {self.tokens[1]}, not {self.tokens[0]}"
            if self.tokens[0] != self.tokens[1]
            else f"log-probability of token {self.tokens[0]} off by {abs(self.logprobs[1] - self.logprobs[0]):.2g}"
        )
        where = f"; {self.place.text}" if self.place is not None else ""
        return f"prompt {self.prompt}, step {self.step}: {what} (margin {self.margin:.2g}){where}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine under one schedule, and how it compares.

    Attributes:
        against: the other cell in words; empty for the reference.
        compared: tokens that were compared, of ``generated``.
        narrow: prompts whose comparison ended at a margin under the bound.
        spread: largest difference of log-probabilities among the compared tokens.
        differing: prompts that break the rule; ``difference`` is that of the first.
        error: what the run raised, or why there was nothing to compare with.
        steps: how many ran in each graph mode.
        fallbacks: reason -> steps without the graph that the mode asks for.
    """

    engine: str
    schedule: Schedule
    rule: Rule
    against: str = ""
    compared: int = 0
    generated: int = 0
    narrow: int = 0
    spread: float = 0.0
    differing: int = 0
    difference: Difference | None = None
    error: str | None = None
    steps: Mapping[str, int] = field(default_factory=dict)
    fallbacks: Mapping[str, int] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.difference is None and self.error is None

    def verdict(self) -> str:
        """The cell in a few words."""
        if self.error is not None:
            return "failed"
        if self.difference is not None:
            return f"DIFFERS in {self.differing} prompt{'s' if self.differing > 1 else ''}"
        if self.rule is Rule.REFERENCE:
            return f"reference, {self.generated} tokens"
        if self.rule is Rule.BITWISE:
            return f"same bits, {self.compared} tokens"
        narrow = f", {self.narrow} ended early" if self.narrow else ""
        return f"within {self.spread:.1g}, {self.compared} of {self.generated} tokens{narrow}"

    def problem(self) -> str | None:
        """What is wrong, in one sentence; None if nothing is."""
        if self.passed:
            return None
        return f"{self.engine}, {self.schedule}: {self.error or self.difference}"

    def as_json(self) -> dict[str, object]:
        found = self.difference
        place = found.place if found is not None else None
        return {
            "engine": self.engine,
            "prefill": self.schedule.prefill.value,
            "batching": self.schedule.batching.value,
            "rule": self.rule.value,
            "against": self.against,
            "passed": self.passed,
            "compared_tokens": self.compared,
            "generated_tokens": self.generated,
            "prompts_ended_by_margin": self.narrow,
            "largest_logprob_difference": self.spread,
            "differing_prompts": self.differing,
            "error": self.error,
            "difference": None
            if found is None
            else {
                "prompt": found.prompt,
                "step": found.step,
                "tokens": list(found.tokens),
                "logprobs": list(found.logprobs),
                "margin": found.margin,
                "first_differing_step": None if place is None else place.step,
                "first_differing_layer": None if place is None else place.layer,
                "place": None if place is None else place.text,
            },
            "steps": dict(self.steps),
            "fallbacks": dict(self.fallbacks),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The whole verification.

    Attributes:
        device: in words.
        prompt_lengths: in tokens.
        selecting: prompts longer than ``index_topk``.
        index_topk: None for a model that attends to everything.
        chunk: tokens a step under chunked prefill.
        hazards: engine -> what the simulated device found; empty on other devices.
    """

    model: str
    device: str
    simulated: bool
    dtype: str
    tokens: int
    margin: float
    seed: int
    max_num_seqs: int
    chunk: int
    prompt_lengths: tuple[int, ...]
    index_topk: int | None
    selecting: int
    cells: tuple[Cell, ...]
    hazards: Mapping[str, tuple[str, ...]]

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.engine for cell in self.cells))

    @property
    def passed(self) -> bool:
        return all(cell.passed for cell in self.cells) and not any(self.hazards.values())

    def problems(self) -> list[str]:
        """Everything that is wrong, a sentence each."""
        wrong = [problem for cell in self.cells if (problem := cell.problem()) is not None]
        return wrong + [f"{engine}: hazard: {text}" for engine, texts in self.hazards.items() for text in texts]

    def steps(self, engine: str) -> Counter[str]:
        """How many of an engine's steps ran in each graph mode."""
        return self._sum(cell.steps for cell in self.cells if cell.engine == engine)

    def fallbacks(self, engine: str) -> Counter[str]:
        """Why how many of an engine's steps ran without a graph."""
        return self._sum(cell.fallbacks for cell in self.cells if cell.engine == engine)

    @staticmethod
    def _sum(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
        total: Counter[str] = Counter()
        for count in counts:
            total.update(count)
        return total

    def cell(self, engine: str, schedule: Schedule) -> Cell:
        return next(cell for cell in self.cells if (cell.engine, cell.schedule) == (engine, schedule))

    def as_json(self) -> dict[str, object]:
        return {
            "model": self.model,
            "device": self.device,
            "simulated": self.simulated,
            "dtype": self.dtype,
            "tokens": self.tokens,
            "margin": self.margin,
            "seed": self.seed,
            "max_num_seqs": self.max_num_seqs,
            "chunk": self.chunk,
            "prompt_lengths": list(self.prompt_lengths),
            "index_topk": self.index_topk,
            "prompts_longer_than_index_topk": self.selecting,
            "passed": self.passed,
            "cells": [cell.as_json() for cell in self.cells],
            "hazards": {engine: list(texts) for engine, texts in self.hazards.items()},
        }
