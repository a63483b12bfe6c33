"""Plain data that leaves the engine: what one step gave a sequence, and what a user gets back.

Field names of ``RequestOutput``, ``CompletionOutput`` and ``Logprob`` are those that vLLM users know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from sidestream.core.request import FinishReason

TopLogprobs: TypeAlias = tuple[tuple[int, float, int], ...]
"""(token id, log-probability, rank) of one row: the chosen token, then the others of the top by rank."""


class CacheReason(StrEnum):
    """Why no longer prefix of a prompt was taken over from the cache."""

    NOTHING_LONGER = "nothing_longer"
    """Nothing longer is cached."""
    LAST_TOKEN = "last_token"
    """All is cached, but the last token must be computed, with its block."""
    NO_SNAPSHOT = "no_snapshot"
    """More blocks are cached, but no state of the linear-attention layers behind them."""
    SHORT = "short"
    """The prompt does not fill a block."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """Log-probabilities of the prompt were asked for, so all of it is computed."""
    DISABLED = "disabled"
    """There is no prefix cache."""


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What one step gave one request: a token, or log-probabilities of a prompt chunk, or both."""

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    logprobs: TopLogprobs | None = None
    prompt_logprobs: tuple[TopLogprobs, ...] = ()
    cached_tokens: int = 0
    """With the first token: prompt tokens that came from the prefix cache, and why not more."""
    cache_reason: CacheReason | None = None
    queue_seconds: float = field(default=0.0, compare=False)
    """With the first token: from the request's arrival to the first step that it was in."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token that a sequence gained when a step was committed."""

    request_id: str
    token_id: int
    finish_reason: FinishReason | None = None
    """Set on the last event of a sequence: its blocks and slot are free again."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the model's raw logits, in nats."""

    logprob: float
    rank: int
    """1 is the most likely token of the vocabulary."""
    decoded_token: str | None = None
    """The token's text; None without a tokenizer."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    """One entry a generated token, the chosen token always among its keys; None if not asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for the end-of-sequence token and other reasons."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry a prompt token, None for the first; None if not asked for."""
    outputs: list[CompletionOutput] = field(default_factory=list)
    cached_tokens: int = 0
    """Prompt tokens that the first completion took over from the prefix cache; known with its first token."""
    cache_reason: CacheReason = CacheReason.DISABLED
    """Why they were not more; known with them."""

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)
