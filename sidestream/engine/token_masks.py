"""Which tokens may come next in requests whose text must have a given form: the bitmasks that the sampler takes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from sidestream.core.request import Request
from sidestream.core.structured_outputs import StructuredOutputs
from sidestream.errors import RequestError

COMPILER_THREADS = 1
"""Steps need the other cores."""
WHITESPACE = 2
"""Most characters of white space in one place of JSON: a model that likes them would otherwise write nothing else."""
CACHE_BYTES = 256 * 2**20
"""Of compiled grammars."""


class TokenMasks(Protocol):
    """Follows constrained requests token by token."""

    def prepare(self, request: Request) -> None:
        """Do the slow part of ``add`` before it, perhaps on another thread; the same errors."""
        ...

    def add(self, request: Request) -> None:
        """Start following a request; RequestError if its form cannot be followed. Others are passed over."""
        ...

    def bitmask(self, request_ids: Sequence[str]) -> torch.Tensor | None:
        """[len(request_ids), ceil(V / 32)] int32: bit b of word w allows token 32 w + b; None if none is bound."""
        ...

    def accept(self, request_id: str, token: int) -> None:
        """A request got a token."""
        ...

    def drop(self, request_id: str) -> None:
        """A request has ended."""
        ...


class NoMasks:
    """For a checkpoint without a tokenizer: no form can be followed."""

    def prepare(self, request: Request) -> None:
        return self.add(request)

    def add(self, request: Request) -> None:
        if request.params.structured_outputs is not None:
            raise RequestError("structured_outputs needs a tokenizer, and this checkpoint has none")

    def bitmask(self, request_ids: Sequence[str]) -> torch.Tensor | None:
        return None

    def accept(self, request_id: str, token: int) -> None:
        return None

    def drop(self, request_id: str) -> None:
        return None


class GrammarMasks:
    """Masks by xgrammar, which is imported with the first constrained request.

    A completion may end only where its form is complete; where nothing can follow, though the form is not complete, it
    must end too.

    Args:
        tokenizer: a transformers tokenizer.
        vocab_size: of the logits.
        eos_token_ids: one of them ends a complete text.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._compiler: Any = None
        self._matchers: dict[str, Any] = {}

    def prepare(self, request: Request) -> None:
        form = request.params.structured_outputs
        if form is not None:
            self._check(request)
            self._compile(form)

    def add(self, request: Request) -> None:
        form = request.params.structured_outputs
        if form is None:
            return
        self._check(request)
        compiled = self._compile(form)
        import xgrammar

        self._matchers[request.request_id] = xgrammar.GrammarMatcher(compiled, override_stop_tokens=self._eos)

    def bitmask(self, request_ids: Sequence[str]) -> torch.Tensor | None:
        constrained = [(row, self._matchers[name]) for row, name in enumerate(request_ids) if name in self._matchers]
        if not constrained:
            return None
        mask = torch.full((len(request_ids), -(-self._vocab_size // 32)), -1, dtype=torch.int32)
        for row, matcher in constrained:
            if matcher.is_terminated():
                mask[row] = 0
            else:
                matcher.fill_next_token_bitmask(mask, row)
            if not mask[row].any():
                for token in self._eos:
                    mask[row, token // 32] |= _bit(token % 32)
        return mask

    def accept(self, request_id: str, token: int) -> None:
        matcher = self._matchers.get(request_id)
        if matcher is not None and not matcher.is_terminated():
            matcher.accept_token(token)  # False for an end that was forced

    def drop(self, request_id: str) -> None:
        self._matchers.pop(request_id, None)

    def _check(self, request: Request) -> None:
        params = request.params
        if importlib.util.find_spec("xgrammar") is None:
            raise RequestError("structured_outputs needs xgrammar, which is not installed: 'sidestream[server]'")
        if not self._eos:
            raise RequestError("structured_outputs needs an end-of-sequence token, and this checkpoint names none")
        for name, off in (("ignore_eos", False), ("min_tokens", 0)):
            if getattr(params, name) != off:
                value = getattr(params, name)
                raise RequestError(
                    f"{name} is {value!r}, which structured_outputs cannot have: its form says when to end"
                )

    def _compile(self, form: StructuredOutputs) -> Any:
        import xgrammar

        if self._compiler is None:
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._eos
            )
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=COMPILER_THREADS, cache_limit_bytes=CACHE_BYTES)
        try:
            if form.json is not None:
                return self._compiler.compile_json_schema(form.json, max_whitespace_cnt=WHITESPACE)
            if form.json_object:
                return self._compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=WHITESPACE)
            if form.regex is not None:
                return self._compiler.compile_regex(form.regex)
            return self._compiler.compile_grammar(form.grammar if form.choice is None else _alternatives(form.choice))
        except (RuntimeError, ValueError, TypeError) as error:
            said = str(error).strip().splitlines()
            raise RequestError(f"structured_outputs cannot be compiled: {said[-1] if said else error!r}") from None


def _alternatives(texts: Sequence[str]) -> str:
    """A grammar of a few literal texts."""
    return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=True) for text in texts)


def _bit(place: int) -> int:
    """One bit of a signed 32-bit word."""
    return -(1 << 31) if place == 31 else 1 << place


def masks_for(tokenizer: Any | None, *, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarMasks | NoMasks:
    """What follows forms for a checkpoint."""
    if tokenizer is None:
        return NoMasks()
    return GrammarMasks(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
