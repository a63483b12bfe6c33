"""Schemas that generation cannot be held to are refused by name, however large, odd or knotted they are."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.errors import RequestError
from sidestream.server.argument_types import ALL_TYPES, json_types
from sidestream.server.call_forms import FORMS
from sidestream.server.parsers import parser_for
from sidestream.server.protocol import Tool
from sidestream.server.tool_schemas import KINDS, MAX_SCHEMAS, Totals

NAMES = sorted(FORMS)
INTEGER = {"type": "integer"}


def of_argument(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **more}


def chain(length: int, copies: int) -> dict[str, Any]:
    """Definitions that each offer the next one some times."""
    links = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * copies} for i in range(length)}
    return of_argument({"$ref": "#/$defs/d0"}, **{"$defs": links | {f"d{length}": INTEGER}})


def knot(schema: dict[str, Any]) -> dict[str, Any]:
    return of_argument({"$ref": "#/$defs/t"}, **{"$defs": {"t": schema}})


SELF = {"$ref": "#/$defs/t"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a bomb": (chain(15, 6), "more than 10000 alternatives"),
    "a deep bomb": (chain(2000, 6), "more than 64 deep"),
    "a long chain": (chain(65, 1), "more than 64 deep"),
    "many values": (of_argument({"enum": list(range(MAX_SCHEMAS + 1))}), "more than 10000 alternatives"),
    "many uses": (
        {
            "properties": {f"a{i}": {"$ref": "#/$defs/t"} for i in range(101)},
            "$defs": {"t": {"enum": list(range(100))}},
        },
        "more than 10000 alternatives",
    ),
    "many schemas": (
        of_argument({"prefixItems": [{"not": {}} for _ in range(MAX_SCHEMAS)]}),
        "more than 10000 schemas",
    ),
    "an alternative of itself": (knot({"anyOf": [SELF, INTEGER]}), "lead to themselves"),
    "a part of itself": (knot({"allOf": [SELF]}), "lead to themselves"),
    "itself": (knot(SELF), "lead to themselves"),
    "the whole": ({"$ref": "#"}, "lead to themselves"),
    "nowhere": (of_argument({"$ref": "#/$defs/t"}), r"\$ref '#/\$defs/t'"),
    "elsewhere": (of_argument({"$ref": "http://x/y"}), r"\$ref 'http://x/y'"),
    "no schema": (of_argument({"$ref": "#/x"}, x=[1]), r"\$ref '#/x'"),
    "odd where only a reference leads": (of_argument({"$ref": "#/x/y"}, x={"y": {"anyOf": 3}}), "anyOf 3"),
    "several parts": (of_argument({"allOf": [INTEGER, {"minimum": 3}]}), "allOf of 2"),
    "several parts at the top": ({"allOf": [of_argument(INTEGER), of_argument(INTEGER)]}, "allOf of 2"),
    "several parts within": (of_argument({"type": "array", "items": {"allOf": [INTEGER, {}]}}), "allOf of 2"),
    "alternatives at the top": ({"anyOf": [of_argument(INTEGER)]}, "anyOf at their top"),
    "exclusive alternatives at the top": ({"oneOf": [of_argument(INTEGER)]}, "oneOf at their top"),
    "alternatives behind a reference": (
        {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "anyOf": [of_argument(INTEGER)]}}},
        "anyOf at their top",
    ),
    "patterns of names": ({"patternProperties": {"^a": INTEGER}}, "patternProperties at their top"),
    "a number of arguments": ({"minProperties": 1}, "minProperties at their top"),
    "a type beside alternatives": (
        of_argument({"type": "string", "anyOf": [{"const": 3}]}),
        "type 'string' beside anyOf",
    ),
    "values beside a reference": (
        of_argument({"$ref": "#/$defs/t", "enum": ["x"]}, **{"$defs": {"t": {"type": "string"}}}),
        r"enum beside \$ref",
    ),
    "values of another type": (of_argument({"type": "string", "enum": [3]}), "none of which has it"),
    "lengths that cross": (
        of_argument({"type": "string", "minLength": 5, "maxLength": 2}),
        "minLength 5 above maxLength 2",
    ),
    "a list of lists for a type": (of_argument({"type": [["string"]]}), r'type \[\["string"\]\]'),
    "an object for a type": (of_argument({"type": {"x": 1}}), r'type \{"x": 1\}'),
    "text for a length": (of_argument({"type": "string", "maxLength": ""}), "maxLength ''"),
    "no values": (of_argument({"enum": []}), r"enum \[\]"),
}


@pytest.mark.parametrize("parser", NAMES)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_held_to_is_refused_by_name(parser: str, kind: str) -> None:
    schema, complaint = REFUSED[kind]
    with pytest.raises(RequestError, match=f"^tools holds the function 'f', .*{complaint}"):
        FORMS[parser].call("f", {"type": "object", **schema}, Totals())


@pytest.mark.parametrize("parser", NAMES)
def test_up_to_the_limits_schemas_are_held_to(parser: str) -> None:
    for schema in (chain(31, 1), chain(4, 6), of_argument({"enum": list(range(MAX_SCHEMAS))})):
        FORMS[parser].call("f", schema, Totals())


@pytest.mark.parametrize("parser", ["glm", "deepseek_v32"])
def test_forms_that_grow_too_large_are_refused_before_they_are_made(parser: str) -> None:
    """Each argument's form holds the definitions that it refers to."""
    uses = {f"a{i}": {"type": "array", "items": {"$ref": "#/$defs/t"}} for i in range(2000)}
    with pytest.raises(RequestError, match="more than 1048576 characters"):
        FORMS[parser].call("f", {"type": "object", "properties": uses, "$defs": {"t": INTEGER}}, Totals())


@pytest.mark.parametrize("parser", ["glm", "deepseek_v32"])
def test_an_argument_that_may_not_be_there(parser: str) -> None:
    forbidden = {"type": "object", "properties": {"a": {"type": "null"}, "b": False}, "required": ["a"]}
    without = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    assert FORMS[parser].call("f", forbidden, Totals()) == FORMS[parser].call("f", without, Totals())
    with pytest.raises(RequestError, match="no value satisfies"):
        FORMS[parser].call("f", of_argument(False), Totals())


def test_types_of_bombs_and_knots_are_found() -> None:
    """Answers are read by schemas that nothing was held to as well."""
    for schema in (chain(15, 6), chain(31, 6)):
        assert json_types(schema["properties"]["a"], schema) == {"integer"}
    for schema in (chain(5000, 6), knot({"anyOf": [SELF, INTEGER]}), knot(SELF), knot({"allOf": [SELF]})):
        assert json_types(schema["properties"]["a"], schema) == ALL_TYPES


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(-2, 2)
    | st.sampled_from(["", "#", "#/$defs/t", "string"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KINDS, "const", "t", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(
    keywords=st.dictionaries(st.sampled_from([*KINDS, "const"]), VALUES, min_size=1, max_size=3),
    top=st.booleans(),
    parser=st.sampled_from(NAMES),
)
def test_any_value_of_any_keyword_is_held_to_or_refused(keywords: dict[str, Any], top: bool, parser: str) -> None:
    schema = {"type": "object", **keywords} if top else of_argument(keywords, **{"$defs": {"t": INTEGER}})
    with contextlib.suppress(RequestError):
        json.dumps(FORMS[parser].call("f", schema, Totals()))
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema}})
    made = parser_for("glm", False, [tool])()
    made.push("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>")
    assert made.finish() is not None
