"""Which tokens may come next in requests whose text must have a given form: the bitmasks that the sampler takes."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from threading import Lock
from typing import Any, Protocol

import torch

from sidestream.core.request import Request
from sidestream.core.structured_outputs import JSON_WHITESPACE, StructuredOutputs
from sidestream.engine.grammar_errors import reason
from sidestream.errors import RequestError

COMPILER_THREADS = 1
"""For one form: steps need the other cores."""
CACHE_BYTES = 256 * 2**20
"""Of compiled grammars."""
CONTROL = re.compile(rb"[\x00-\x09\x0b-\x1f]")


class TokenMasks(Protocol):
    """Follows constrained requests token by token."""

    def prepare(self, request: Request) -> None:
        """Do the slow part of ``add`` before it, perhaps on other threads, several at once; the same errors."""
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
        form = request.params.structured_outputs
        if form is not None:
            raise RequestError(f"{form.source} needs a tokenizer, and this checkpoint has none")

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
        self._info: Any = None
        self._opening = Lock()
        self._printable: torch.Tensor | None = None
        """[ceil(V / 32)]: tokens without control characters other than newlines."""
        self._matchers: dict[str, Any] = {}
        self._forms: dict[str, StructuredOutputs] = {}

    def prepare(self, request: Request) -> None:
        form = request.params.structured_outputs
        if form is not None:
            self._check(request, form)
            self._compile(form)

    def add(self, request: Request) -> None:
        form = request.params.structured_outputs
        if form is None:
            return
        self._check(request, form)
        compiled = self._compile(form)
        import xgrammar

        self._matchers[request.request_id] = xgrammar.GrammarMatcher(compiled, override_stop_tokens=self._eos)
        self._forms[request.request_id] = form

    def bitmask(self, request_ids: Sequence[str]) -> torch.Tensor | None:
        constrained = [(row, name) for row, name in enumerate(request_ids) if name in self._matchers]
        if not constrained:
            return None
        mask = torch.full((len(request_ids), -(-self._vocab_size // 32)), -1, dtype=torch.int32)
        for row, name in constrained:
            if self._matchers[name].is_terminated():
                mask[row] = 0
            else:
                self._matchers[name].fill_next_token_bitmask(mask, row)
            if self._printable is not None and not self._forms[name].control_characters:
                mask[row] &= self._printable
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
        self._forms.pop(request_id, None)

    def _check(self, request: Request, form: StructuredOutputs) -> None:
        if importlib.util.find_spec("xgrammar") is None:
            raise RequestError(f"{form.source} needs xgrammar, which is not installed (the server extra has it)")
        if not self._eos:
            raise RequestError(f"{form.source} needs an end-of-sequence token, and this checkpoint names none")
        for name, off in (("ignore_eos", False), ("min_tokens", 0)):
            if (value := getattr(request.params, name)) != off:
                raise RequestError(f"{name} is {value!r}, which {form.source} cannot have: its form says when to end")

    def _compile(self, form: StructuredOutputs) -> Any:
        with self._opening:
            self._open(form)
        try:
            if form.json is not None:
                return self._compiler.compile_json_schema(form.json, max_whitespace_cnt=JSON_WHITESPACE)
            if form.json_object:
                return self._compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=JSON_WHITESPACE)
            if form.regex is not None:
                return self._compiler.compile_regex(form.regex)
            if form.structural_tag is not None:
                return self._compiler.compile_structural_tag(form.structural_tag)
            return self._compiler.compile_grammar(form.grammar if form.choice is None else _alternatives(form.choice))
        except (RuntimeError, ValueError, TypeError) as error:
            why = reason(error, keep_place=form.grammar is not None)
            raise RequestError(f"{form.source} cannot be compiled: {why}") from None

    def _open(self, form: StructuredOutputs) -> None:
        """Make what compiling a form needs, once."""
        import xgrammar

        if self._compiler is None:
            self._info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._eos
            )
            self._compiler = xgrammar.GrammarCompiler(
                self._info, max_threads=COMPILER_THREADS, cache_limit_bytes=CACHE_BYTES
            )
        if not form.control_characters and self._printable is None:
            printable = [not CONTROL.search(token) for token in self._info.decoded_vocab]
            self._printable = _words(printable, self._vocab_size)


def _alternatives(texts: Sequence[str]) -> str:
    """A grammar of a few literal texts."""
    return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=True) for text in texts)


def _words(allowed: Sequence[bool], size: int) -> torch.Tensor:
    """[ceil(size / 32)] int32: bit b of word w is set if token 32 w + b is allowed; tokens beyond ``allowed`` are."""
    bits = torch.ones(-(-size // 32) * 32, dtype=torch.int64)
    bits[: len(allowed)] = torch.tensor(allowed)
    return (bits.view(-1, 32) << torch.arange(32)).sum(1).to(torch.int32)


def _bit(place: int) -> int:
    """One bit of a signed 32-bit word."""
    return -(1 << 31) if place == 31 else 1 << place


def masks_for(tokenizer: Any | None, *, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarMasks | NoMasks:
    """What follows forms for a checkpoint."""
    if tokenizer is None:
        return NoMasks()
    return GrammarMasks(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
