"""Schemas of a function's arguments that generation can be held to; any other is refused by what it says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from sidestream.core.structured_outputs import MAX_TAG_CHARACTERS
from sidestream.errors import RequestError
from sidestream.server.argument_types import ALL_TYPES, DEPTH, TypesOf, pointed_at, resolved, type_of
from sidestream.server.errors import shown

MAX_SCHEMAS = 10_000
"""Schemas within those of one request's functions; and alternatives of all arguments, each time that they are referred
to."""
MAX_MEMBERS = 256
"""Keywords of one schema, known or not: those of a reference and of what it leads to are merged at each use."""
ALTERNATIVES = ("anyOf", "oneOf")
Check = Callable[[Any], bool]


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping | bool)


def _is_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_named_schemas(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_schema, value.values()))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_type(value: Any) -> bool:
    kinds = value if isinstance(value, list) else [value]
    return bool(kinds) and all(isinstance(kind, str) and kind in ALL_TYPES for kind in kinds)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kinds(check: Check, what: str, *keywords: str) -> dict[str, tuple[Check, str]]:
    return dict.fromkeys(keywords, (check, what))


NAMED = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
SINGLE = ("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else")
SEVERAL = (*ALTERNATIVES, "allOf", "prefixItems")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
KINDS = {
    **_kinds(_is_type, f"one or more of {', '.join(sorted(ALL_TYPES))}", "type"),
    **_kinds(lambda value: isinstance(value, list) and bool(value), "a list of values", "enum"),
    **_kinds(_is_names, "a list of names", "required"),
    **_kinds(lambda value: isinstance(value, str), "text", "$ref", "pattern", "format"),
    **_kinds(_is_count, "a whole number from 0 to 2147483647", *COUNTS),
    **_kinds(_is_number, "a number", *RANGES),
    **_kinds(lambda value: isinstance(value, bool), "true or false", "uniqueItems"),
    **_kinds(_is_named_schemas, "schemas by name", *NAMED),
    **_kinds(_is_schemas, "a list of schemas", *SEVERAL),
    **_kinds(_is_schema, "a schema", *SINGLE),
}
"""What the value of a keyword must be."""
CONSTRAINTS = frozenset(KINDS) - {"$defs", "definitions"} | {"const"}
NOT_OF_A_FUNCTION = (
    *ALTERNATIVES,
    *("patternProperties", "propertyNames", "minProperties", "maxProperties", "enum", "const"),
)
"""What the arguments as a whole cannot be held to: they are written one by one."""


class Totals:
    """What the functions of one request hold together. Each ``add`` may find that to be too much.

    Raises:
        RequestError: naming the function that is one too many, and the limit.
    """

    def __init__(self) -> None:
        self._schemas = self._alternatives = self._characters = self._written = 0

    def add_parameters(self, parameters: Mapping[str, Any], where: str) -> None:
        self._characters += len(json.dumps(parameters))
        if self._characters > MAX_TAG_CHARACTERS:
            said = f"{where} bring the schemas of the request to {self._characters} characters"
            raise RequestError(f"{said}, {_limit(MAX_TAG_CHARACTERS)}")

    def add_schema(self, where: str) -> None:
        self._schemas += 1
        if self._schemas > MAX_SCHEMAS:
            raise RequestError(f"{where} bring the request to more than {MAX_SCHEMAS} schemas, {_limit(MAX_SCHEMAS)}")

    def add_alternatives(self, count: int, where: str) -> None:
        self._alternatives += count
        if self._alternatives > MAX_SCHEMAS:
            raise RequestError(
                f"{where} bring the request to more than {MAX_SCHEMAS} alternatives of anyOf, oneOf and enum, "
                f"{_limit(MAX_SCHEMAS)}"
            )

    def add_form(self, form: Any) -> None:
        """A part of what generation is held to."""
        self._written += len(json.dumps(form))
        if self._written > MAX_TAG_CHARACTERS:
            raise RequestError(
                f"tools holds arguments of a form of more than {MAX_TAG_CHARACTERS} characters, "
                f"{_limit(MAX_TAG_CHARACTERS)}"
            )


def _limit(limit: int) -> str:
    return f"the limit of all functions together is {limit}; send fewer functions, or simpler ones"


def check_schema(name: str, parameters: Mapping[str, Any], totals: Totals) -> None:
    """See that generation can be held to a function's schema.

    Raises:
        RequestError: naming the function, the keyword and what is wrong with it.
    """
    where = f"tools holds the function {shown(name)}, whose parameters"
    totals.add_parameters(parameters, where)
    schemas = list(_schemas(parameters, where, totals))
    extents = _Extents(parameters, where)
    for schema in schemas:
        extents(schema)
    whole = resolved(parameters, parameters)
    for schema in whole.get("properties", {}).values():
        totals.add_alternatives(extents(schema)[1], where)
    for key in NOT_OF_A_FUNCTION:
        if key in whole:
            raise RequestError(f"{where} have {key} at their top, which generation cannot be held to")
    types = TypesOf(parameters)
    for schema in schemas:
        _check_company(schema, types, where, whole=schema is parameters)


def alternatives(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schemas without ``anyOf`` and ``oneOf`` of which one must hold, of a schema that was checked."""
    if schema is False:
        return
    schema = resolved(schema, root) if isinstance(schema, Mapping) else {}
    options = [option for key in ALTERNATIVES for option in schema.get(key, ())]
    for option in options:
        yield from alternatives(option, root)
    if not options:
        yield schema


def _schemas(parameters: Mapping[str, Any], where: str, totals: Totals) -> Iterator[Mapping[str, Any]]:
    """Every schema once, its keywords' values checked, also those that only references lead to."""
    seen: set[int] = set()
    left: list[Any] = [parameters]
    while left:
        schema = left.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        totals.add_schema(where)
        if len(schema) > MAX_MEMBERS:
            raise RequestError(f"{where} hold a schema of {len(schema)} keywords, the limit is {MAX_MEMBERS}")
        for key, value in schema.items():
            if key not in KINDS:
                continue
            check, what = KINDS[key]
            if not check(value):
                raise RequestError(f"{where} have {key} {shown(value)}, which must be {what}")
            left += _parts(key, value)
        yield schema
        if "$ref" in schema:
            left.append(pointed_at(schema["$ref"], parameters))
            if not _is_schema(left[-1]):
                raise RequestError(f"{where} have $ref {shown(schema['$ref'])}, which leads to no schema within them")


def _parts(key: str, value: Any) -> Iterable[Any]:
    """Schemas within a keyword's value."""
    if key in NAMED:
        return list(value.values())
    if key in SEVERAL:
        return list(value)
    return [value] if key in SINGLE else ()


class _Extents:
    """How many references and alternatives lead on from each other at the place of a schema, and how many alternatives
    there are in all; each schema is looked at once.
    """

    def __init__(self, root: Mapping[str, Any], where: str) -> None:
        self._root = root
        self._known: dict[int, tuple[int, int]] = {}
        self._limit = f"{where} have $ref, anyOf, oneOf or allOf that lead to themselves or more than {DEPTH} deep"

    def __call__(self, schema: Any, depth: int = 0) -> tuple[int, int]:
        if not isinstance(schema, Mapping):
            return 0, 1
        if id(schema) not in self._known:
            if depth > DEPTH:
                raise RequestError(f"{self._limit}, the limit")
            parts = [part for key in (*ALTERNATIVES, "allOf") for part in schema.get(key, ())]
            parts += [pointed_at(schema["$ref"], self._root)] if "$ref" in schema else []
            within = [self(part, depth + 1) for part in parts]
            height = 1 + max((height for height, _ in within), default=-1)
            self._known[id(schema)] = height, len(schema.get("enum", "1")) + sum(size for _, size in within)
        if depth + self._known[id(schema)][0] > DEPTH:
            raise RequestError(f"{self._limit}, the limit")
        return self._known[id(schema)]


def _check_company(schema: Mapping[str, Any], types: TypesOf, where: str, *, whole: bool) -> None:
    """What stands beside a reference or alternatives would not be looked at."""
    if "allOf" in schema and (len(schema["allOf"]) > 1 or not isinstance(schema["allOf"][0], Mapping)):
        raise RequestError(f"{where} have allOf of {len(schema['allOf'])}, generation can be held to one schema of it")
    for low, high in (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")):
        if schema.get(low, 0) > schema.get(high, 2**31):
            raise RequestError(f"{where} have {low} {schema[low]} above {high} {schema[high]}")
    said = schema.get("type", [])
    allowed = {said} if isinstance(said, str) else set(said)
    allowed |= {"integer"} if "number" in allowed else set()
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    if allowed and values and not any(type_of(value) in allowed for value in values):
        raise RequestError(f"{where} have type {shown(said)} beside {shown(values)}, none of which has it")
    leads = [key for key in ("$ref", "allOf", *ALTERNATIVES) if key in schema]
    if not leads:
        return
    beside = sorted((schema.keys() & CONSTRAINTS) - {leads[0], "type"})
    if beside:
        raise RequestError(f"{where} have {beside[0]} beside {leads[0]}, generation can be held to one of them")
    bare = {key: value for key, value in schema.items() if key != "type"}
    if allowed and not whole and not types(bare) <= allowed:
        raise RequestError(f"{where} have type {shown(said)} beside {leads[0]}, generation can be held to one of them")
