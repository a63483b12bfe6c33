"""What a request asks of the sampler, checked once when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sidestream.core.structured_outputs import StructuredOutputs
from sidestream.errors import RequestError

MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 64
MAX_N = 128
MAX_INTEGER = 2**63 - 1
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Beyond them a few repetitions leave the range of float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request. Field names and defaults are those that vLLM users know.

    Args:
        n: completions for the prompt; completion ``i`` of a seeded request uses seed ``seed + i``.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches it, in (0, 1].
        min_p: drop tokens less likely than ``min_p`` times the most likely one, in [0, 1].
        presence_penalty, frequency_penalty: OpenAI's, over generated tokens, in [-2, 2].
        repetition_penalty: over prompt and generated tokens, 0.01 to 100; 1 is off.
        logit_bias: token id to a number added to its logit.
        seed: makes the request repeatable; None draws one.
        max_tokens: upper bound of generated tokens, clamped to the room left; None is all the room.
        min_tokens: end-of-sequence and stop token ids are masked before that many tokens.
        stop: strings that end the completion; cut from the text unless ``include_stop_str_in_output``.
        stop_token_ids: token ids that end it.
        ignore_eos: do not stop at the end-of-sequence token.
        logprobs: return the log-probabilities of that many top tokens, the chosen one always added.
        prompt_logprobs: the same for every prompt token but the first.
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: a form that the text must have; needs the package ``xgrammar``.
    Raises:
        RequestError: naming the field, its value and the allowed range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(s, str) for s in stop):
            raise RequestError(f"stop must be a string or a list of strings, got {self.stop!r}")
        if not isinstance(self.stop_token_ids, Sequence) or isinstance(self.stop_token_ids, str | bytes):
            raise RequestError(f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}")
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _flag(name, getattr(self, name))
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise RequestError(f"structured_outputs must be StructuredOutputs, got {self.structured_outputs!r}")
        _int("n", self.n, 1, MAX_N)
        _real("temperature", self.temperature, 0.0, math.inf)
        _int("top_k", self.top_k, -1, None)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        if self.seed is not None:
            _int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _int("max_tokens", self.max_tokens, 1, None)
        _int("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} is larger than max_tokens {self.max_tokens}")
        for name, limit in (("logprobs", MAX_LOGPROBS), ("prompt_logprobs", MAX_LOGPROBS)):
            if getattr(self, name) is not None:
                _int(name, getattr(self, name), 0, limit)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop has {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are allowed")
        if any(not s for s in self.stop):
            raise RequestError("stop holds an empty string, which would end every completion at once")
        for token in self.stop_token_ids:
            _int("stop_token_ids", token, 0, None)
        for token, bias in self.logit_bias.items():
            _int("logit_bias token id", token, 0, None)
            _real(f"logit_bias[{token}]", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """The next token depends on which tokens came before, beyond what the model sees."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {value!r}")


def _int(name: str, value: object, low: int | None, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}")
    if (low is not None and value < low) or (high is not None and value > high):
        allowed = f">= {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} is {value}, allowed is {allowed}")


def _real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, got {value!r}")
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise RequestError(f"{name} is an integer beyond {MAX_INTEGER}")
    inside = (low < value if open_low else low <= value) and value <= high and math.isfinite(value)
    if not inside:
        bound = ">" if open_low else ">="
        allowed = f"{bound} {low}" + ("" if math.isinf(high) else f" and <= {high}")
        raise RequestError(f"{name} is {value}, allowed is {allowed}")
