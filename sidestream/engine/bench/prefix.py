"""Workloads in which prompts begin alike, served with the prefix cache and without it: times to the first token."""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.bench.summary import percentile
from sidestream.engine.bench.workload import FIRST_TOKEN
from sidestream.engine.build import BuiltEngine
from sidestream.engine.core import EngineCore

P99_SAMPLES = 100
"""Fewer have no p99."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Prompts of one system prompt and a tail of their own, so many at a time.

    Attributes:
        shared, tail, answer: tokens.
    """

    NAME: ClassVar[str] = "shared-prefix"

    requests: int = 32
    shared: int = 512
    tail: int = 100
    answer: int = 16
    concurrency: int = 4

    @property
    def longest(self) -> int:
        return self.shared + self.tail + self.answer

    def conversations(self, rng: random.Random, vocab: int) -> list[Conversation]:
        """One of one turn for each request."""
        stem = _draw(rng, vocab, self.shared)
        return [Conversation(stem, [_draw(rng, vocab, self.tail)], self.answer) for _ in range(self.requests)]


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Conversations that grow by a message and an answer each turn, so many at a time.

    Attributes:
        system, message, answer: tokens.
    """

    NAME: ClassVar[str] = "multi-turn"

    chats: int = 4
    turns: int = 8
    system: int = 200
    message: int = 50
    answer: int = 50
    concurrency: int = 4

    @property
    def longest(self) -> int:
        return self.system + self.turns * (self.message + self.answer)

    def conversations(self, rng: random.Random, vocab: int) -> list[Conversation]:
        """All of one system prompt."""
        stem = _draw(rng, vocab, self.system)
        turns = [[_draw(rng, vocab, self.message) for _ in range(self.turns)] for _ in range(self.chats)]
        return [Conversation(stem, messages, self.answer) for messages in turns]


@dataclass(slots=True)
class Conversation:
    """What was said so far, what will be asked, and how many tokens each answer has."""

    history: list[int]
    messages: list[list[int]]
    answer: int
    asked: float = 0.0
    told: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PrefixTimes:
    """One run of a workload.

    Attributes:
        cache: whether the prefix cache was on.
        cached_tokens: of ``prompt_tokens``, those taken over.
        first_token_ms: median time from asking to the first token, waiting included.
        first_token_mean_ms, first_token_p90_ms: of the same times; nine of ten are below the latter.
        first_token_p99_ms: None where there are too few requests to tell.
        tokens_a_second: prompt and generated tokens over all of the time.
    """

    cache: bool
    requests: int
    prompt_tokens: int
    cached_tokens: int
    first_token_ms: float
    first_token_mean_ms: float
    first_token_p90_ms: float
    first_token_p99_ms: float | None
    tokens_a_second: float
    snapshots_taken: int
    snapshots_restored: int

    def __str__(self) -> str:
        p99 = "" if self.first_token_p99_ms is None else f", p99 {self.first_token_p99_ms:.1f}"
        share = self.cached_tokens / max(self.prompt_tokens, 1)
        return (
            f"cache {'on' if self.cache else 'off'}: {self.requests} requests, {share:.1%} of {self.prompt_tokens} "
            f"prompt tokens taken over; first token after {self.first_token_ms:.1f} ms (p90 "
            f"{self.first_token_p90_ms:.1f}{p99}), {self.tokens_a_second:,.0f} tokens a second"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def compare(
    built: BuiltEngine,
    workload: SharedPrefix | MultiTurn,
    *,
    seed: int = 0,
    on_row: Callable[[PrefixTimes], None] = lambda row: None,
) -> list[PrefixTimes]:
    """Run a workload without the cache, then with it; the same prompts, after a run that is not counted."""
    rows = []
    for counted, cache in ((False, True), (True, False), (True, True)):
        engine = replace(built, config=replace(built.config, prefix_caching=cache))
        row = run(engine, workload, seed=seed if counted else seed + 1)
        if counted:
            rows.append(row)
            on_row(row)
    return rows


def run(built: BuiltEngine, workload: SharedPrefix | MultiTurn, *, seed: int) -> PrefixTimes:
    """Serve the workload on an empty cache."""
    rng, vocab = random.Random(seed), built.config.model.vocab_size
    waiting = deque(workload.conversations(rng, vocab))
    core = EngineCore(built)
    open_ones: dict[str, Conversation] = {}
    names = map(str, range(1 << 30))
    first: list[float] = []
    prompt_tokens = cached_tokens = generated = 0
    begin = time.perf_counter()
    while waiting or open_ones:
        while waiting and len(open_ones) < workload.concurrency:
            name = next(names)
            open_ones[name] = waiting.popleft()
            prompt_tokens += _ask(core, name, open_ones[name])
        for output in core.step():
            chat = open_ones[output.request_id]
            if output.token_id is None:
                continue
            if not chat.told:
                first.append((time.perf_counter() - chat.asked) * 1e3)
                cached_tokens += output.cached_tokens
            chat.told.append(output.token_id)
            generated += 1
            if output.finish_reason is not None:
                chat.history += chat.told
                del open_ones[output.request_id]
                if chat.messages:
                    waiting.appendleft(chat)
    seconds = time.perf_counter() - begin
    stats = core.scheduler.prefix_stats
    return PrefixTimes(
        cache=built.config.prefix_caching,
        requests=len(first),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        first_token_ms=statistics.median(first),
        first_token_mean_ms=statistics.fmean(first),
        first_token_p90_ms=percentile(sorted(first), 0.9),
        first_token_p99_ms=p99_of(first),
        tokens_a_second=(prompt_tokens + generated) / seconds,
        snapshots_taken=stats.snapshots_taken,
        snapshots_restored=stats.snapshots_restored,
    )


def p99_of(times: Sequence[float]) -> float | None:
    """None for fewer than ``P99_SAMPLES``."""
    return percentile(sorted(times), 0.99) if len(times) >= P99_SAMPLES else None


def _ask(core: EngineCore, name: str, chat: Conversation) -> int:
    """Send a conversation's next message; tokens of the prompt."""
    chat.history = chat.history + chat.messages.pop(0)
    chat.told = []
    chat.asked = time.perf_counter()
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    core.add(Request(name, tuple(chat.history), params, 0, chat.answer, frozenset(), ()))
    return len(chat.history)


def _draw(rng: random.Random, vocab: int, count: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, vocab) for _ in range(count)]
