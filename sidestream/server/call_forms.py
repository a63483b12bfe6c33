"""Tool calls as forms that generation must follow: each family's own format around arguments of a JSON schema.

A form is a part of one of xgrammar's structural tags, plain data that the engine compiles. What is written by it is
read by the parsers of ``parsers.py``, and the arguments that they make of it satisfy the schema, but for what
docs/server.md names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from sidestream.core.structured_outputs import JSON_WHITESPACE
from sidestream.errors import RequestError
from sidestream.server.argument_types import ALL_TYPES, TEXT, json_types, properties_of, resolved, type_of
from sidestream.server.errors import shown
from sidestream.server.parsers import (
    END_THINK,
    THINK,
    DeepSeekV31Parser,
    DeepSeekV32Parser,
    GlmParser,
)
from sidestream.server.tool_schemas import Totals, alternatives, check_schema

Form: TypeAlias = dict[str, Any]
NAME = r'[^<>"\s]+'
"""Of an argument that no schema names."""
LENGTHS = ('"minLength"', '"maxLength"')


class CallForms(Protocol):
    """One family's format."""

    opening: str
    """Begins calls; every answer that holds it is a call."""

    def call(self, name: str, parameters: Mapping[str, Any], totals: Totals) -> Form:
        """One call of a function, whose arguments satisfy a schema of type object.

        Args:
            totals: of the request's functions, to which this one is added.
        Raises:
            RequestError: generation cannot be held to the schema, or the functions together are too large.
        """
        ...

    def block(self, calls: Sequence[Form], *, parallel: bool) -> Form:
        """One call or, if ``parallel``, several, of some functions."""
        ...

    def among_text(self, calls: Sequence[Form], *, parallel: bool) -> Form:
        """Text in which calls may come, until the first has ended unless ``parallel``."""
        ...


class GlmForms:
    """``<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>``, as from GLM-4.7 on: no newlines."""

    opening = GlmParser.opening
    end_of_value = "</arg_value>"

    def call(self, name: str, parameters: Mapping[str, Any], totals: Totals) -> Form:
        check_schema(name, parameters, totals)
        arguments = _arguments(parameters, self._argument, self._any_argument(), totals)
        return tag(self.opening + name, arguments, GlmParser.closing)

    def block(self, calls: Sequence[Form], *, parallel: bool) -> Form:
        return _one_or_more(calls, parallel=parallel)

    def among_text(self, calls: Sequence[Form], *, parallel: bool) -> Form:
        return _triggered(self.opening, calls, parallel=parallel)

    def _argument(self, name: str, schema: Any, root: Mapping[str, Any]) -> Form:
        values = [form for _, form in _values(schema, root, self.end_of_value)]
        return tag(f"<arg_key>{name}</arg_key><arg_value>", either(values), self.end_of_value)

    def _any_argument(self) -> Form:
        key = tag("<arg_key>", regex(NAME), "</arg_key>")
        return sequence([key, tag("<arg_value>", text(self.end_of_value), self.end_of_value)])


class DeepSeekV31Forms:
    """JSON between tokens of its own."""

    opening = DeepSeekV31Parser.opening

    def call(self, name: str, parameters: Mapping[str, Any], totals: Totals) -> Form:
        check_schema(name, parameters, totals)
        end = DeepSeekV31Parser.end_of_call
        arguments = _json(parameters, parameters, end)
        return tag(f"{DeepSeekV31Parser.call}{name}{DeepSeekV31Parser.separator}", arguments, end)

    def block(self, calls: Sequence[Form], *, parallel: bool) -> Form:
        return tag(self.opening, _one_or_more(calls, parallel=parallel), DeepSeekV31Parser.closing)

    def among_text(self, calls: Sequence[Form], *, parallel: bool) -> Form:
        return _triggered(self.opening, [self.block(calls, parallel=parallel)], parallel=parallel)


class DeepSeekV32Forms:
    """``invoke`` and ``parameter`` elements, a line each."""

    opening = DeepSeekV32Parser.opening
    parameter = DeepSeekV32Parser.parameter
    end_of_value = DeepSeekV32Parser.end_of_value

    def call(self, name: str, parameters: Mapping[str, Any], totals: Totals) -> Form:
        check_schema(name, parameters, totals)
        arguments = _arguments(parameters, self._argument, self._any_argument(), totals)
        return tag(f'{DeepSeekV32Parser.invoke}{name}">\n', arguments, f"{DeepSeekV32Parser.end_of_call}\n")

    def block(self, calls: Sequence[Form], *, parallel: bool) -> Form:
        return tag(f"{self.opening}\n", _one_or_more(calls, parallel=parallel), DeepSeekV32Parser.closing)

    def among_text(self, calls: Sequence[Form], *, parallel: bool) -> Form:
        return _triggered(self.opening, [self.block(calls, parallel=parallel)], parallel=parallel)

    def _argument(self, name: str, schema: Any, root: Mapping[str, Any]) -> Form:
        values = _values(schema, root, self.end_of_value)
        if any(is_text for is_text, _ in values) and json_types(schema, root) == ALL_TYPES:
            values.append((False, _json({}, root, self.end_of_value)))
        return sequence([const(f"{self.parameter}{name}"), self._attributes(values)])

    def _any_argument(self) -> Form:
        values = [(True, text(self.end_of_value)), (False, _json({}, {}, self.end_of_value))]
        return sequence([const(self.parameter), regex(NAME), self._attributes(values)])

    def _attributes(self, values: Sequence[tuple[bool, Form]]) -> Form:
        """The rest of an element behind its name: whether the value is text, and the value."""
        kinds = ((said, [form for is_text, form in values if is_text is wanted]) for said, wanted in KINDS)
        return either(
            [tag(f'" string="{said}">', either(forms), f"{self.end_of_value}\n") for said, forms in kinds if forms]
        )


KINDS = (("true", True), ("false", False))
FORMS: Mapping[str, CallForms] = {
    "glm": GlmForms(),
    "deepseek_v31": DeepSeekV31Forms(),
    "deepseek_v32": DeepSeekV32Forms(),
}


def behind_reasoning(form: Form, *, thinking: bool, closed: bool) -> Form:
    """A form with reasoning before it: to its end if the prompt has begun it, none if the prompt has ended it, else
    as the model likes.
    """
    if closed:
        return form
    gap = regex("\n{0,2}")
    inside = text(THINK, END_THINK)
    if thinking:
        return sequence([tag("", inside, END_THINK), gap, form])
    part = sequence([regex("\n?"), tag(THINK, inside, END_THINK), gap])
    return sequence([{"type": "optional", "content": part}, form])


def tag(begin: str, content: Form, end: str) -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def text(*excludes: str, **limits: int) -> Form:
    return {"type": "any_text", "excludes": list(excludes), **limits}


def const(value: str) -> Form:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> Form:
    return {"type": "regex", "pattern": pattern}


def sequence(elements: Sequence[Form]) -> Form:
    return {"type": "sequence", "elements": list(elements)} if elements else const("")


def either(elements: Sequence[Form]) -> Form:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def _one_or_more(calls: Sequence[Form], *, parallel: bool) -> Form:
    return {
        "type": "tags_with_separator",
        "tags": list(calls),
        "separator": "",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _triggered(opening: str, tags: Sequence[Form], *, parallel: bool) -> Form:
    return {
        "type": "triggered_tags",
        "triggers": [opening],
        "tags": list(tags),
        "excludes": [THINK, END_THINK],
        "stop_after_first": not parallel,
    }


def _arguments(parameters: Mapping[str, Any], argument: Any, any_argument: Form, totals: Totals) -> Form:
    """The members of an object one by one, in the schema's order; members that it does not name only if it says so."""
    root = parameters
    parameters = resolved(parameters, root)
    named = dict(properties_of(root))
    needed = parameters.get("required", [])
    named |= {name: {} for name in needed if name not in named}
    elements = []
    for name, schema in named.items():
        if schema is False and name not in needed:
            continue
        if not writable(name):
            raise RequestError(f"tools holds the parameter {shown(name)}, a name that a call cannot spell")
        form = argument(name, schema, root)
        totals.add_form(form)
        elements.append(form if name in needed else {"type": "optional", "content": form})
    if parameters.get("additionalProperties", "properties" not in parameters) is not False:
        elements.append({"type": "star", "content": any_argument})
    return sequence(elements)


def writable(name: str) -> bool:
    """A name that survives between tags."""
    return bool(name) and name == name.strip() and not set(name) & set('<>"\n')


def _values(schema: Any, root: Mapping[str, Any], end: str) -> list[tuple[bool, Form]]:
    """Forms of a value that stands as text or as JSON (True for text) before ``end``."""
    texts: list[tuple[bool, Form]] = []
    others: list[Mapping[str, Any]] = []
    for option in alternatives(schema, root):
        types = json_types(option, root)
        if "enum" in option or "const" in option:
            literals = [option["const"]] if "const" in option else option["enum"]
            texts += [_literal(value) for value in literals if type_of(value) in types]
        elif types == ALL_TYPES:
            texts.append((True, text(end)))
        else:
            if "string" in types:
                texts.append((True, _text(option, end)))
            if types - TEXT:
                others.append({**option, "type": sorted(types - TEXT)} if "string" in types else option)
    if others:
        texts.append((False, _json(others[0] if len(others) == 1 else {"anyOf": others}, root, end)))
    if not texts:
        raise RequestError(f"tools holds an argument that no value satisfies, of the schema {shown(schema)}")
    return texts


def _literal(value: Any) -> tuple[bool, Form]:
    return isinstance(value, str), const(value if isinstance(value, str) else json.dumps(value))


def _text(schema: Mapping[str, Any], end: str) -> Form:
    """A string as it is, without quotes."""
    if "pattern" in schema:
        return regex(schema["pattern"])
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    rest = text(end) if high is None else text(end, max_chars=high - low)
    return sequence([regex(f"[^<]{{{low}}}"), rest]) if low else rest


def _json(schema: Mapping[str, Any], root: Mapping[str, Any], end: str) -> Form:
    """A value as JSON; ``end`` does not occur in its strings, unless lengths are given: xgrammar keeps one of both."""
    spelt = json.dumps(schema)
    if '"$ref"' in spelt and schema is not root:
        schema = {**root, "$ref": "#/the argument", "the argument": schema}
    excludes = [] if any(length in spelt for length in LENGTHS) else [end]
    return {
        "type": "json_schema",
        "json_schema": dict(schema),
        "max_whitespace_cnt": JSON_WHITESPACE,
        "excludes": excludes,
    }
