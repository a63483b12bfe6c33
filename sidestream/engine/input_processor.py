"""Turns a user's prompt and sampling parameters into requests of the engine core, or refuses them by name."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, cast

from jinja2.exceptions import TemplateError

from sidestream.config.model import ModelConfig
from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.errors import RequestError

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with one of ``PROMPT_KEYS``; such may hold a ``cache_salt`` (text) too: only prompts of
equal salts share cached prefixes."""
PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


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
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters must be SamplingParams, got {type(params).__name__}")
        text, token_ids = self._tokenize(prompt)
        salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        if salt is None:
            salt = ""
        if not isinstance(salt, str) or not salt.isprintable():
            raise RequestError(f"cache_salt must be printable text, got {salt!r}")
        self._check_tokens("prompt", token_ids)
        self._check_tokens("logit_bias", params.logit_bias)
        self._check_tokens("stop_token_ids", params.stop_token_ids)
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this checkpoint has none; use stop_token_ids")
        room = self._max_model_len - len(token_ids)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens and the engine serves sequences of at most "
                f"{self._max_model_len}, prompt and completion together (max_model_len)",
                code="context_length_exceeded",
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        ends = frozenset(self._model.eos_token_ids)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else ends)
        mask = tuple(sorted(stops | ends))
        if params.min_tokens and len(mask) >= self._model.vocab_size:
            raise RequestError(
                f"min_tokens {params.min_tokens} masks the stop token ids until then, and these are the whole "
                f"vocabulary of {self._model.vocab_size}"
            )
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        requests = tuple(
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}#{i}",
                prompt_token_ids=tuple(token_ids),
                params=params,
                seed=seed + i,
                max_tokens=max_tokens,
                stop_token_ids=stops,
                mask_token_ids=mask,
                cache_salt=salt,
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
                raise RequestError(
                    "the prompt is text, which needs a tokenizer, and this checkpoint has none; pass token ids"
                )
            return prompt, self._encode(prompt, add_special_tokens=True)
        if hasattr(prompt, "tolist"):  # an array or a tensor
            prompt = prompt.tolist()
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise RequestError(f"a prompt is a string, a list of token ids or a mapping, got {type(prompt).__name__}")
        token_ids = [int(t) if isinstance(t, Integral) and not isinstance(t, bool) else t for t in prompt]
        if not token_ids:
            raise RequestError("the prompt is an empty list of token ids")
        return None, cast(list[int], token_ids)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert self._tokenizer is not None
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt holds half a surrogate pair at character {error.start}") from None
        token_ids = list(self._tokenizer(text, add_special_tokens=add_special_tokens).input_ids)
        if not token_ids:
            raise RequestError(f"the prompt {text!r} has no tokens")
        return token_ids

    def _tokenize_mapping(self, prompt: Mapping[str, Any]) -> tuple[str | None, list[int]]:
        known = [key for key in PROMPT_KEYS if prompt.get(key) is not None]
        if len(known) != 1:
            raise RequestError(f"a prompt mapping has exactly one of {', '.join(PROMPT_KEYS)}, got {list(prompt)}")
        value = prompt[known[0]]
        if known[0] != "messages":
            if isinstance(value, Mapping) or isinstance(value, str) is not (known[0] == "prompt"):
                raise RequestError(f"{known[0]!r} holds {type(value).__name__}")
            return self._tokenize(value)
        if self._tokenizer is None or not getattr(self._tokenizer, "chat_template", None):
            raise RequestError("messages need a chat template, and this checkpoint has none; pass a plain prompt")
        text = self._render(value)
        return text, self._encode(text, add_special_tokens=False)

    def _render(self, messages: Any) -> str:
        """Messages as text, by the checkpoint's chat template, which may refuse them in any way it likes."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError(f"messages must be a non-empty list of {{role, content}}, got {messages!r}")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(f"a message needs a 'role', which is text, got {message!r}")
            if not isinstance(message.get("content"), str | list | tuple):
                raise RequestError(f"a message needs 'content', text or a list of parts, got {message!r}")
        assert self._tokenizer is not None
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except TEMPLATE_ERRORS as error:
            raise RequestError(f"the checkpoint's chat template refuses these messages: {error}") from error
        if not text:
            raise RequestError("the checkpoint's chat template makes an empty prompt of these messages")
        return str(text)

    def _check_tokens(self, what: str, token_ids: Sequence[int] | Mapping[int, float]) -> None:
        vocab = self._model.vocab_size
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(f"{what} holds {token!r}, which is not a token id")
            if not 0 <= token < vocab:
                raise RequestError(f"{what} holds token id {token}, the model's vocabulary is 0 to {vocab - 1}")
