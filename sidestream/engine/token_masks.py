"""Which tokens may come next in requests whose text must have a given form: the bitmasks that the sampler takes."""

from __future__ import annotations

import importlib.util
import re
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from threading import Lock
from typing import Any, Protocol

import torch

from sidestream.core.request import Request
from sidestream.core.structured_outputs import StructuredOutputs
from sidestream.engine.form_grammar import COMPILE_ERRORS, compile_form, why_refused
from sidestream.engine.form_trials import Attempt, FormTrials
from sidestream.errors import RequestError

COMPILER_THREADS = 1
"""For one form: steps need the other cores."""
CACHE_BYTES = 256 * 2**20
"""Of compiled grammars."""
PASSED_FORMS = 4096
"""That are not tried again, should they have left the cache."""
CONTROL = re.compile(rb"[\x00-\x09\x0b-\x1f]")


class TokenMasks(Protocol):
    """Follows constrained requests token by token."""

    def check(self, request: Request) -> None:
        """RequestError if the request cannot be followed, whatever its form holds."""
        ...

    def prepare(self, form: StructuredOutputs, attempt: Attempt) -> Any:
        """Do the slow part of ``add``, perhaps on other threads, several at once.

        Returns:
            What ``expect`` takes.
        Raises:
            RequestError: the form cannot be followed, or takes too long.
            TooSlowError, CancelledAttemptError: the attempt ended first.
        """
        ...

    def known(self, form: StructuredOutputs) -> bool:
        """``prepare`` needs no trial for it: it had one. Waits for nothing."""
        ...

    def expect(self, request_id: str, prepared: Any) -> None:
        """Keep what was prepared for a request until it is added or dropped."""
        ...

    def add(self, request: Request) -> None:
        """Start following a request; the errors of ``prepare``, which is done here if nothing is expected. Requests
        without a form are passed over.
        """
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

    def check(self, request: Request) -> None:
        if (form := request.params.structured_outputs) is not None:
            self.prepare(form, Attempt())

    def prepare(self, form: StructuredOutputs, attempt: Attempt) -> Any:
        raise RequestError(f"{form.source} needs a tokenizer, and this checkpoint has none")

    def known(self, form: StructuredOutputs) -> bool:
        return False

    def expect(self, request_id: str, prepared: Any) -> None:
        return None

    def add(self, request: Request) -> None:
        self.check(request)

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
        max_form_seconds: that it may take to compile a form, tried in a process that is killed then.
    """

    def __init__(
        self, tokenizer: Any, *, vocab_size: int, eos_token_ids: Sequence[int], max_form_seconds: float
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._compiler: Any = None
        self._info: Any = None
        self._opening = Lock()
        self._max_form_seconds = max_form_seconds
        self._trials: FormTrials | None = None
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        """Digests of forms that may be compiled, the last ones met at the end."""
        self._expected: dict[str, Any] = {}
        self._printable: torch.Tensor | None = None
        """[ceil(V / 32)]: tokens without control characters other than newlines."""
        self._matchers: dict[str, Any] = {}
        self._forms: dict[str, StructuredOutputs] = {}

    def prepare(self, form: StructuredOutputs, attempt: Attempt) -> Any:
        with self._opening:
            self._open(form)
            digest = _digest(form)
            passed = digest in self._passed
        if not passed:
            assert self._trials is not None, "made with the compiler"
            self._trials.check(form, attempt)
        with self._opening:
            self._passed[digest] = None
            self._passed.move_to_end(digest)
            if len(self._passed) > PASSED_FORMS:
                self._passed.popitem(last=False)
        try:
            return compile_form(self._compiler, form)
        except COMPILE_ERRORS as error:
            raise RequestError(f"{form.source} cannot be compiled: {why_refused(error, form)}") from None

    def known(self, form: StructuredOutputs) -> bool:
        return _digest(form) in self._passed

    def expect(self, request_id: str, prepared: Any) -> None:
        self._expected[request_id] = prepared

    def add(self, request: Request) -> None:
        form = request.params.structured_outputs
        if form is None:
            return
        self.check(request)
        compiled = self._expected.pop(request.request_id, None)
        if compiled is None:
            compiled = self.prepare(form, Attempt())
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
        self._expected.pop(request_id, None)
        self._matchers.pop(request_id, None)
        self._forms.pop(request_id, None)

    def check(self, request: Request) -> None:
        form = request.params.structured_outputs
        if form is None:
            return
        if importlib.util.find_spec("xgrammar") is None:
            raise RequestError(f"{form.source} needs xgrammar, which is not installed (the server extra has it)")
        if not self._eos:
            raise RequestError(f"{form.source} needs an end-of-sequence token, and this checkpoint names none")
        for name, off in (("ignore_eos", False), ("min_tokens", 0)):
            if (value := getattr(request.params, name)) != off:
                raise RequestError(f"{name} is {value!r}, which {form.source} cannot have: its form says when to end")

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
            self._trials = FormTrials(self._info.serialize_json, limit=self._max_form_seconds)
        if not form.control_characters and self._printable is None:
            printable = [not CONTROL.search(token) for token in self._info.decoded_vocab]
            self._printable = _words(printable, self._vocab_size)


def _words(allowed: Sequence[bool], size: int) -> torch.Tensor:
    """[ceil(size / 32)] int32: bit b of word w is set if token 32 w + b is allowed; tokens beyond ``allowed`` are."""
    bits = torch.ones(-(-size // 32) * 32, dtype=torch.int64)
    bits[: len(allowed)] = torch.tensor(allowed)
    return (bits.view(-1, 32) << torch.arange(32)).sum(1).to(torch.int32)


def _bit(place: int) -> int:
    """One bit of a signed 32-bit word."""
    return -(1 << 31) if place == 31 else 1 << place


def masks_for(
    tokenizer: Any | None, *, vocab_size: int, eos_token_ids: Sequence[int], max_form_seconds: float
) -> GrammarMasks | NoMasks:
    """What follows forms for a checkpoint."""
    if tokenizer is None:
        return NoMasks()
    return GrammarMasks(
        tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids, max_form_seconds=max_form_seconds
    )


def _digest(form: StructuredOutputs) -> bytes:
    return sha256(repr(form).encode(errors="surrogatepass")).digest()
