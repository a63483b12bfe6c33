"""Forms that cannot be compiled: why is said in words for whoever sent them."""

from __future__ import annotations

import re

import pytest

from sidestream.core.structured_outputs import StructuredOutputs
from sidestream.engine.form_trials import Attempt
from sidestream.engine.grammar_errors import UNKNOWN, reason
from sidestream.engine.llm import bundled_model
from sidestream.engine.token_masks import TokenMasks, masks_for
from sidestream.engine.tokenizer import load_tokenizer
from sidestream.errors import RequestError

INTERNALS = re.compile(r"\.cc|Check failed|\[\d\d:|/project|parser error|lexer error|JSON string is|&&|MAX_|0x")
FORMS = [
    ({"json": {"type": "poem"}}, 'Unsupported type "poem"'),
    ({"json": {"type": "array", "minItems": 5, "maxItems": 1}}, "minItems is greater than maxItems: 5 > 1"),
    ({"json": {"minLength": -1, "type": "string"}}, "Invalid repetition range {-1, -1}"),
    ({"json": {"type": "integer", "minimum": 1e300}}, "Integer exceeds maximum limit"),
    ({"json": {"$ref": "#/nope"}}, "Cannot find field 'nope' in #/nope"),
    ({"json": {"const": "\ud800"}}, 'Failed to parse JSON: syntax error at line 1 near: "}'),
    ({"json": {"pattern": "(", "type": "string"}}, "at position 2: The parenthesis is not closed"),
    ({"regex": "("}, "at position 2: The parenthesis is not closed"),
    ({"regex": "a{5,1}"}, "Lower bound is larger than upper bound: 5 > 1"),
    ({"regex": "a\n\\p{L}"}, "at position 3: Unicode character class escape sequence is not supported yet"),
    ({"grammar": "root ::= x"}, 'at line 1, column 10: Rule "x" is not defined'),
    ({"grammar": 'root ::= "a\nx'}, 'at line 1, column 12: Expect " in string literal'),
    ({"grammar": "root ::= ("}, "at line 1, column 11: Expect element, but got"),
]


@pytest.fixture(scope="module")
def masks() -> TokenMasks:
    tokenizer = load_tokenizer(bundled_model())
    return masks_for(tokenizer, vocab_size=len(tokenizer), eos_token_ids=[0], max_form_seconds=60)


@pytest.mark.parametrize(("form", "why"), FORMS)
def test_a_form_that_cannot_be_compiled(masks: TokenMasks, form: dict[str, object], why: str) -> None:
    with pytest.raises(RequestError) as caught:
        masks.prepare(StructuredOutputs(**form), Attempt())  # type: ignore[arg-type]
    assert str(caught.value) == f"structured_outputs cannot be compiled: {why}"
    assert not INTERNALS.search(str(caught.value))


@pytest.mark.parametrize(
    "error",
    [
        TypeError("compile_regex(): incompatible function arguments. The following are supported: (self, str)"),
        RuntimeError("[10:00:00] /a/b.cc:7: Check failed: (a::b(c) == d) is false: \n"),
        RuntimeError("[10:00:00] /a/b.cc:7: pointer 0x7f3a9c is null"),
        RuntimeError("std::bad_alloc"),
        RuntimeError(""),
    ],
)
def test_what_says_nothing_to_a_user_is_not_repeated(error: Exception) -> None:
    assert reason(error, keep_place=True) == UNKNOWN


def test_long_complaints_are_cut() -> None:
    assert len(reason(RuntimeError("x" * 10_000), keep_place=False)) == 200
