"""Calls as forms: whatever is drawn from a form is a call by its parser, with arguments that satisfy the schema."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import pytest

from sidestream.errors import RequestError
from sidestream.server.answer_pieces import CallArguments, CallStart, Content, Reasoning
from sidestream.server.call_forms import FORMS, behind_reasoning
from sidestream.server.parsers import BAR, parser_for
from sidestream.server.protocol import Tool
from sidestream.server.tool_schemas import Totals
from tests.server.drawer import Drawer

NAMES = sorted(FORMS)
SCHEMAS: dict[str, dict[str, Any]] = {
    "types": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "hot": {"type": "boolean"},
            "share": {"type": "number", "minimum": 0, "maximum": 1},
        },
        "required": ["city", "days", "hot", "share"],
    },
    "digits as text": {
        "type": "object",
        "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "kind": {"enum": ["1", "true", "null"]}},
        "required": ["zip", "kind"],
    },
    "literals": {
        "type": "object",
        "properties": {"unit": {"enum": ["c", "f", None, 3]}, "fixed": {"const": {"a": [1]}}},
        "required": ["unit", "fixed"],
    },
    "lengths": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "minLength": 3, "maxLength": 5},
            "to": {"type": "string", "maxLength": 0},
        },
        "required": ["id", "to"],
    },
    "nested": {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
            "at": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "y": {"type": ["integer", "null"]}},
                "required": ["x", "y"],
                "additionalProperties": False,
            },
        },
        "required": ["tags", "at"],
        "additionalProperties": False,
    },
    "optional": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": ["string", "null"], "maxLength": 6},
            "c": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
        "additionalProperties": False,
    },
    "references": {
        "type": "object",
        "properties": {
            "color": {"$ref": "#/$defs/Color"},
            "maybe": {"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]},
            "points": {"type": "array", "items": {"$ref": "#/$defs/Point"}, "minItems": 1, "maxItems": 2},
        },
        "required": ["color", "maybe", "points"],
        "$defs": {
            "Color": {"type": "string", "enum": ["red", "12"]},
            "Point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        },
    },
    "a reference alone": {
        "$ref": "#/$defs/P",
        "$defs": {"P": {"type": "object", "properties": {"n": {"type": "string", "maxLength": 3}}, "required": ["n"]}},
    },
    "a part alone": {
        "allOf": [{"$ref": "#/$defs/P"}],
        "title": "P",
        "$defs": {
            "P": {
                "type": "object",
                "properties": {"u": {"allOf": [{"$ref": "#/$defs/U"}], "default": "c"}},
                "required": ["u"],
            },
            "U": {"enum": ["c", "7"], "type": "string"},
        },
    },
    "a type said twice": {
        "type": "object",
        "properties": {
            "a": {"type": ["string", "null"], "anyOf": [{"const": "q"}, {"type": "null"}]},
            "b": {
                "oneOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"type": "boolean"}, {"$ref": "#/$defs/E"}]
            },
        },
        "required": ["a", "b"],
        "$defs": {"E": {"anyOf": [{"$ref": "#/$defs/N"}, {"$ref": "#/$defs/N"}]}, "N": {"type": "null"}},
    },
    "nothing": {"type": "object", "properties": {}, "additionalProperties": False},
}

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
NOTHING = SCHEMAS["nothing"]


@pytest.fixture(scope="module")
def drawer() -> Drawer:
    return Drawer()


def tool(name: str, parameters: dict[str, Any] | None) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})


def read(
    parser: str, text: str, tools: list[Tool], *, thinking: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content, and calls as (name, arguments)."""
    made = parser_for(parser, thinking, tools)()
    pieces = made.push(text) + made.finish()
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return (
        "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
        "".join(piece.text for piece in pieces if isinstance(piece, Content)),
        calls,
    )


@pytest.mark.parametrize("parser", NAMES)
@pytest.mark.parametrize("kind", SCHEMAS)
def test_drawn_calls_satisfy_the_schema(drawer: Drawer, parser: str, kind: str) -> None:
    schema, forms = SCHEMAS[kind], FORMS[parser]
    form = forms.block([forms.call("f", schema, Totals())], parallel=False)
    for seed in range(3):
        text = drawer.draw(form, seed)
        _, content, calls = read(parser, text, [tool("f", schema)])
        assert content == "", text
        ((name, arguments),) = calls
        assert name == "f"
        assert jsonschema_rs.is_valid(schema, json.loads(arguments)), f"{arguments} from {text}"


@pytest.mark.parametrize("parser", NAMES)
def test_one_or_more_calls_of_any_of_the_functions(drawer: Drawer, parser: str) -> None:
    forms, tools = FORMS[parser], [tool("get", NOTHING), tool("get_more", CITY)]
    calls = [forms.call(each.function.name, each.function.parameters or {}, Totals()) for each in tools]
    one, more = (forms.block(calls, parallel=parallel) for parallel in (False, True))
    drawn = [drawer.draw(form, 0) for form in (*calls, forms.block(calls[:1], parallel=False))]
    first, second, alone = (re.sub(r"\{\s+\}", "{}", text) for text in drawn)
    assert first in alone
    for text, names in (
        (alone, ["get"]),
        (alone.replace(first, second), ["get_more"]),
        (alone.replace(first, first + second + first), ["get", "get_more", "get"]),
    ):
        _, content, found = read(parser, text, tools)
        assert (content, [name for name, _ in found]) == ("", names)
        assert drawer.accepts(more, text)
        assert drawer.accepts(one, text) is (len(names) == 1)
    assert not drawer.accepts(more, alone.replace(first, ""))
    assert not drawer.accepts(more, "")


@pytest.mark.parametrize("parser", NAMES)
def test_calls_among_text(drawer: Drawer, parser: str) -> None:
    """Text is free until a call begins, which then must be one; nothing follows the only one that is allowed."""
    forms = FORMS[parser]
    call = forms.call("get_more", CITY, Totals())
    block = drawer.draw(forms.block([call], parallel=False), 1)
    one, more = (forms.among_text([call], parallel=parallel) for parallel in (False, True))
    for form in (one, more):
        for text in ("", "No call: 1 < 2, <b>, {}", f"I look.\n\n{block}"):
            assert drawer.accepts(form, text), text
        assert not drawer.accepts(form, block.replace("get_more", "get_other"))
        assert not drawer.accepts(form, block.replace("city", "town"))
    assert drawer.accepts(more, f"{block} and {block}")
    assert not drawer.accepts(one, f"{block} and {block}")


ANY_CALL = {
    "glm": "<tool_call>f<arg_key>x-y</arg_key><arg_value>a\n<b></arg_value>"
    "<arg_key>é</arg_key><arg_value>[1]</arg_value></tool_call>",
    "deepseek_v31": '<|tool▁calls▁begin|><|tool▁call▁begin|>f<|tool▁sep|>{"x-y": "a\\n<b>", "é": [1]}'
    "<|tool▁call▁end|><|tool▁calls▁end|>",
    "deepseek_v32": '<|DSML|function_calls>\n<|DSML|invoke name="f">\n'
    '<|DSML|parameter name="x-y" string="true">a\n<b></|DSML|parameter>\n'
    '<|DSML|parameter name="é" string="false">[1]</|DSML|parameter>\n</|DSML|invoke>\n</|DSML|function_calls>',
}


@pytest.mark.parametrize("parser", NAMES)
def test_arguments_that_no_schema_names(drawer: Drawer, parser: str) -> None:
    """They may come where the schema has no properties at all, or asks for others."""
    forms = FORMS[parser]
    text = ANY_CALL[parser].replace("|", BAR) if "deepseek" in parser else ANY_CALL[parser]
    ((_, arguments),) = read(parser, text, [tool("f", {})])[2]
    assert json.loads(arguments) == {"x-y": "a\n<b>", "é": [1]}
    named = {"type": "object", "properties": {"a": {"type": "null"}}}
    for schema, whether in (
        ({"type": "object"}, True),
        (named | {"additionalProperties": True}, True),
        (named, False),
        (NOTHING, False),
    ):
        assert drawer.accepts(forms.block([forms.call("f", schema, Totals())], parallel=False), text) is whether, schema


@pytest.mark.parametrize("parser", NAMES)
def test_reasoning_comes_first_where_it_may(drawer: Drawer, parser: str) -> None:
    forms = FORMS[parser]
    calls = forms.block([forms.call("now", NOTHING, Totals())], parallel=False)
    block = drawer.draw(calls, 0)
    begun, ended, either = (
        behind_reasoning(calls, thinking=thinking, closed=closed)
        for thinking, closed in ((True, False), (False, True), (False, False))
    )
    reasoned = f"is {forms.opening} needed?</think>\n\n{block}"
    for form, text, whether in (
        (begun, reasoned, True),
        (begun, block, False),
        (ended, block, True),
        (ended, f"<think>{reasoned}", False),
        (either, block, True),
        (either, f"\n<think>{reasoned}", True),
        (either, reasoned, False),
    ):
        assert drawer.accepts(form, text) is whether, text
    tools = [tool("now", NOTHING)]
    assert read(parser, reasoned, tools, thinking=True) == (f"is {forms.opening} needed?", "", [("now", "{}")])


@pytest.mark.parametrize("parser", ["glm", "deepseek_v32"])
def test_names_that_would_be_taken_for_tags_are_refused(parser: str) -> None:
    for name in ("a<b", 'a"', " a", "", "a\nb"):
        with pytest.raises(RequestError, match="cannot spell"):
            FORMS[parser].call("f", {"type": "object", "properties": {name: {}}}, Totals())


@pytest.mark.parametrize("parser", NAMES)
@pytest.mark.parametrize(
    "schema", [{"type": "poem"}, {"type": "array", "items": {"type": 5}}, {"type": "string", "pattern": "("}]
)
def test_schemas_that_are_none_are_not_compiled(drawer: Drawer, parser: str, schema: dict[str, Any]) -> None:
    forms = FORMS[parser]
    parameters = {"type": "object", "properties": {"a": schema}}
    with pytest.raises((RuntimeError, RequestError)):
        drawer.compile(forms.call("f", parameters, Totals()))
