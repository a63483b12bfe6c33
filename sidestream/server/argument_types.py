"""Which JSON types an argument of a tool may have, by its schema, and how its text is read by them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import reduce
from typing import Any

ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
TEXT = frozenset({"string"})
NOTABLE = re.compile(r'["\\\x00-\x1f]')
DEPTH = 64
"""References and alternatives within each other that are followed."""


def json_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Types that a schema allows; all of them where it says nothing.

    Args:
        schema: of the argument.
        root: the schema that local references (``#/$defs/...``) point into.
    """
    return TypesOf(root)(schema)


class TypesOf:
    """The types that schemas within ``root`` allow. Each is looked at once; one that leads back to itself says nothing
    there.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[int, frozenset[str]] = {}
        self._kept: list[Any] = []

    def __call__(self, schema: Any, depth: int = DEPTH) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth == 0:
            return ALL_TYPES
        if id(schema) not in self._known:
            self._kept.append(schema)  # no other schema gets its id
            self._known[id(schema)] = ALL_TYPES
            self._known[id(schema)] = self._look(schema, depth - 1)
        return self._known[id(schema)]

    def _look(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        said: list[frozenset[str]] = []
        if isinstance(reference := schema.get("$ref"), str):
            said.append(self(pointed_at(reference, self._root), depth))
        if isinstance(kind := schema.get("type"), str):
            said.append(frozenset({kind}))
        elif isinstance(kind, list):
            said.append(frozenset(k for k in kind if isinstance(k, str)))
        elif "properties" in schema:
            said.append(frozenset({"object"}))
        if isinstance(values := schema.get("enum"), list):
            said.append(frozenset(type_of(value) for value in values))
        if "const" in schema:
            said.append(frozenset({type_of(schema["const"])}))
        for key in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(key), list) and options:
                said.append(frozenset().union(*(self(option, depth) for option in options)))
        if isinstance(parts := schema.get("allOf"), list):
            said += [self(part, depth) for part in parts]
        return reduce(_both, said, ALL_TYPES) or ALL_TYPES


def type_of(value: Any) -> str:
    """JSON's name for a value's type."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    for kind, name in ((str, "string"), (int, "integer"), (float, "number"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with what its own reference points to, or with the only part of its ``allOf``, as far as such lead to
    something.
    """
    for _ in range(DEPTH + 1):
        if isinstance(schema.get("$ref"), str):
            key, found = "$ref", pointed_at(schema["$ref"], root)
        elif isinstance(parts := schema.get("allOf"), list) and len(parts) == 1:
            key, found = "allOf", parts[0]
        else:
            break
        if not isinstance(found, Mapping):
            break
        schema = {**found, **{name: value for name, value in schema.items() if name != key}}
    return schema


def properties_of(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Schemas of a function's arguments by name."""
    properties = resolved(parameters, parameters).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def value_text(text: str, types: frozenset[str]) -> str:
    """An argument as JSON text: what was written, where that is JSON of an allowed type, else a string of it.

    Text is not unquoted where the schema names strings: templates write strings as they are. Where no type allows what
    was written, JSON stays JSON.
    """
    if types != TEXT:
        try:
            value = json.loads(
                text, strict=False, parse_constant=_refuse, parse_int=lambda _: 0, parse_float=lambda _: 0.5
            )
        except (ValueError, RecursionError):
            pass
        else:
            named = types != ALL_TYPES and "string" in types
            allowed = types | ({"integer"} if "number" in types else frozenset())
            if not named or (not isinstance(value, str) and type_of(value) in allowed):
                return JsonText().push(text.strip())
    return json.dumps(text, ensure_ascii=False)


def pointed_at(reference: str, root: Mapping[str, Any]) -> Any:
    """What a local reference points to, None if nothing does."""
    found: Any = root
    if reference != "#" and not reference.startswith("#/"):
        return None
    for part in reference.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found


class JsonText:
    """JSON that comes in pieces, with control characters in its strings escaped: models write newlines there, and
    strings of limited length may be drawn with any.
    """

    def __init__(self) -> None:
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> str:
        out, start = [], 0
        for match in NOTABLE.finditer(text):
            place, character = match.start(), match[0]
            if self._escaped and place > start:
                self._escaped = False
            out.append(text[start:place])
            start = place + 1
            out.append(self._next(character))
        if start < len(text):
            self._escaped = False
        return "".join(out) + text[start:]

    def _next(self, character: str) -> str:
        escaped, self._escaped = self._escaped, False
        if not self._in_string:
            self._in_string = character == '"'
        elif character < " ":
            return json.dumps(character)[1:-1]
        elif not escaped:
            self._escaped = character == "\\"
            self._in_string = character != '"'
        return character


def _both(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """Types that two schemas allow; an integer is a number."""
    either = {"integer", "number"}
    integer = {"integer"} if one & either and other & either else set()
    return frozenset((one & other) | integer)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
