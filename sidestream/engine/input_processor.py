"""Turns a user's prompt and sampling parameters into requests of the engine core, or refuses them by name."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sidestream.config.model import ModelConfig
from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.errors import RequestError

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with one of "prompt", "prompt_token_ids" and "messages"."""


@dataclass(frozen=True, slots=True)
class ProcessedPrompt:
    """One user request: its text if it had one, its token ids, and one engine request a completion."""

    request_id: str
    text: str | None
    token_ids: list[int]
    params: SamplingParams
    requests: tuple[Request, ...]


class InputProcessor:
    """Checks, tokenises and fans out prompts.

    Args:
        tokenizer: a transformers tokenizer, or None for a checkpoint without one.
        max_model_len: longest sequence that the engine serves.
        seed: of the seeds drawn for requests that bring none.
    """

    def __init__(self, model: ModelConfig, tokenizer: Any | None, *, max_model_len: int, seed: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._seeds = random.Random(seed)

    def process(self, request_id: str, prompt: Prompt, params: SamplingParams) -> ProcessedPrompt:
        """Check a prompt and fan it out into ``params.n`` requests.

        Raises:
            RequestError: naming what is wrong; no state changes but the seed sequence.
        """
        text, token_ids = self._tokenize(prompt)
        self._check_tokens("prompt", token_ids)
        self._check_tokens("logit_bias", params.logit_bias)
        self._check_tokens("stop_token_ids", params.stop_token_ids)
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this checkpoint has none; use stop_token_ids")
        room = self._max_model_len - len(token_ids)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens and the engine serves sequences of at most "
                f"{self._max_model_len}, prompt and completion together (max_model_len)"
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        ends = frozenset(self._model.eos_token_ids)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else ends)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        requests = tuple(
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}#{i}",
                prompt_token_ids=tuple(token_ids),
                params=params,
                seed=seed + i,
                max_tokens=max_tokens,
                stop_token_ids=stops,
                mask_token_ids=tuple(sorted(stops | ends)),
            )
            for i in range(params.n)
        )
        return ProcessedPrompt(request_id, text, token_ids, params, requests)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            return self._tokenize_mapping(prompt)
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is an empty string")
            if self._tokenizer is None:
                raise RequestError("a text prompt needs a tokenizer, and this checkpoint has none; pass token ids")
            return prompt, list(self._tokenizer(prompt).input_ids)
        if not isinstance(prompt, Sequence):
            raise RequestError(f"a prompt is a string, a list of token ids or a mapping, got {type(prompt).__name__}")
        token_ids = list(cast(Sequence[int], prompt))
        if not token_ids:
            raise RequestError("the prompt is an empty list of token ids")
        return None, token_ids

    def _tokenize_mapping(self, prompt: Mapping[str, Any]) -> tuple[str | None, list[int]]:
        known = [key for key in ("prompt", "prompt_token_ids", "messages") if key in prompt]
        if len(known) != 1:
            raise RequestError(
                f"a prompt mapping has exactly one of 'prompt', 'prompt_token_ids' and 'messages', got {sorted(prompt)}"
            )
        value = prompt[known[0]]
        if known[0] != "messages":
            if isinstance(value, str) is not (known[0] == "prompt"):
                raise RequestError(f"{known[0]!r} holds {type(value).__name__}")
            return self._tokenize(value)
        if self._tokenizer is None or not getattr(self._tokenizer, "chat_template", None):
            raise RequestError("messages need a chat template, and this checkpoint has none; pass a plain prompt")
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise RequestError(f"messages must be a non-empty list of {{role, content}}, got {value!r}")
        for message in value:
            if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
                raise RequestError(f"a message needs 'role' and 'content', got {message!r}")
        text = self._tokenizer.apply_chat_template(list(value), tokenize=False, add_generation_prompt=True)
        return text, list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _check_tokens(self, what: str, token_ids: Sequence[int] | Mapping[int, float]) -> None:
        vocab = self._model.vocab_size
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(f"{what} holds {token!r}, which is not a token id")
            if not 0 <= token < vocab:
                raise RequestError(f"{what} holds token id {token}, the model's vocabulary is 0 to {vocab - 1}")
