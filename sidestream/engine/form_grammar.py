"""A form as xgrammar compiles it, and as it is tried: compiled, then followed for a few tokens."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from sidestream.core.structured_outputs import JSON_WHITESPACE, StructuredOutputs
from sidestream.engine.grammar_errors import reason

COMPILE_ERRORS = (RuntimeError, ValueError, TypeError)
"""What xgrammar raises for a form that is none."""
STEP_SECONDS = 0.1
"""Of the processor, for what may come next in one request: all requests of a step wait for it. Usual forms take 0.1 to
15 ms with 129,000 tokens; ambiguous ones take minutes."""
TRIED_TOKENS = 16
"""Tokens that a trial goes on to: what may come next is often found quickly at the start alone."""


class Outcome(StrEnum):
    """How a trial ended."""

    PASSED = "passed"
    REFUSED = "refused"
    """xgrammar says what is wrong with the form."""
    SLOW = "slow"
    """Its time was up."""
    SLOW_STEPS = "slow steps"
    MEMORY = "memory"
    BROKEN = "broken"
    """It ended its process."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial says of a form; ``why`` in the words that its outcome lacks."""

    outcome: Outcome
    why: str = ""


def compile_form(compiler: Any, form: StructuredOutputs) -> Any:
    """The form as a ``CompiledGrammar``; ``COMPILE_ERRORS`` if it is none."""
    if form.json is not None:
        return compiler.compile_json_schema(form.json, max_whitespace_cnt=JSON_WHITESPACE)
    if form.json_object:
        return compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=JSON_WHITESPACE)
    if form.regex is not None:
        return compiler.compile_regex(form.regex)
    if form.structural_tag is not None:
        return compiler.compile_structural_tag(form.structural_tag)
    return compiler.compile_grammar(form.grammar if form.choice is None else _alternatives(form.choice))


def why_refused(error: Exception, form: StructuredOutputs) -> str:
    """xgrammar's complaint, in words for whoever sent the form."""
    return reason(error, keep_place=form.grammar is not None)


def try_form(info: Any, form: StructuredOutputs) -> Verdict:
    """Compile a form and follow it for a few tokens drawn at random, always the same.

    Args:
        info: xgrammar's ``TokenizerInfo``.
    """
    import xgrammar

    try:
        compiled = compile_form(xgrammar.GrammarCompiler(info, max_threads=1), form)
        seconds = _slowest_step(xgrammar, compiled, info)
    except MemoryError:
        return Verdict(Outcome.MEMORY)
    except COMPILE_ERRORS as error:
        if "bad_alloc" in str(error):
            return Verdict(Outcome.MEMORY)
        return Verdict(Outcome.REFUSED, why_refused(error, form))
    return Verdict(Outcome.PASSED) if seconds <= STEP_SECONDS else Verdict(Outcome.SLOW_STEPS, f"{seconds:.3g}")


def _slowest_step(xgrammar: Any, compiled: Any, info: Any) -> float:
    """Seconds of the processor; the first step above the limit is the last."""
    draw = random.Random(0)
    stops = frozenset(info.stop_token_ids)
    mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    slowest, began = 0.0, time.thread_time()
    matcher = xgrammar.GrammarMatcher(compiled)
    for _ in range(TRIED_TOKENS):
        matcher.fill_next_token_bitmask(mask, 0)
        slowest = max(slowest, time.thread_time() - began)
        allowed = [token for token in _tokens_of(mask[0], info.vocab_size) if token not in stops]
        if slowest > STEP_SECONDS or not allowed:
            break
        began = time.thread_time()
        matcher.accept_token(draw.choice(allowed))
    return slowest


def _tokens_of(words: torch.Tensor, vocab_size: int) -> list[int]:
    """Tokens that a bitmask allows: [ceil(vocab_size / 32)] int32."""
    bits = words.view(-1, 1) >> torch.arange(32, dtype=torch.int32) & 1
    found: list[int] = bits.flatten()[:vocab_size].nonzero().flatten().tolist()
    return found


def _alternatives(texts: Sequence[str]) -> str:
    """A grammar of a few literal texts."""
    return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=True) for text in texts)
