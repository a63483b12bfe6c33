"""Plain data that enters the engine: one request, one sequence of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sidestream.core.sampling_params import SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"
    """End-of-sequence token, stop token id or stop string."""
    LENGTH = "length"
    """``max_tokens`` or the model's length reached."""
    ABORT = "abort"
    """Aborted by the caller."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to be completed. A user request with ``n > 1`` enters as n of these.

    ``seed`` is resolved (never None), ``max_tokens`` is clamped to the room left, ``stop_token_ids`` holds the
    end-of-sequence ids too unless ``ignore_eos``: so the engine core needs no tokenizer and no clock.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    mask_token_ids: tuple[int, ...]
    """Ids masked until ``min_tokens`` are generated: the stop and end-of-sequence ids."""
    cache_salt: str = ""
    """Only requests of equal salts share cached prefixes."""
