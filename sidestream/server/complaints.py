"""What is wrong with a body that does not fit its model, in words of our own: field, value, and what is allowed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import NoneType
from typing import Any, TypeAlias, get_args

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel

from sidestream.server.errors import ApiError, shown

Path: TypeAlias = tuple[str | int, ...]

WANTED = {
    "string_type": "text",
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
"""What a field of a wrong type should have been."""
BOUNDS = {
    "greater_than_equal": ("ge", "at least", "below_min"),
    "greater_than": ("gt", "more than", "below_min"),
    "less_than_equal": ("le", "at most", "above_max"),
    "less_than": ("lt", "less than", "above_max"),
}
SIZES = {
    "too_short": ("min_length", "at least", "items", "array_below_min_length"),
    "too_long": ("max_length", "at most", "items", "array_above_max_length"),
    "string_too_short": ("min_length", "at least", "characters", "string_below_min_length"),
    "string_too_long": ("max_length", "at most", "characters", "string_above_max_length"),
}
NEAR = 0.85
"""How alike two names must be, 0 to 1, before one is taken for a slip of the other."""


@dataclass(frozen=True, slots=True)
class _Problem:
    """One of pydantic's complaints.

    Attributes:
        path: names and places in the body that was sent, from the outside in.
        branch: path of the field at which one of several allowed forms was tried; None if it has only one.
        value: that is there.
    """

    kind: str
    path: Path
    branch: Path | None
    value: Any
    context: Mapping[str, Any]

    @property
    def of_type(self) -> bool:
        return self.kind in WANTED

    @property
    def rank(self) -> tuple[int, bool, list[int]]:
        """How near the sender's meaning: the form that fits furthest, and within it the most exact complaint."""
        return len(self.path), not self.of_type, [part for part in self.path if isinstance(part, int)]


def of_request(request: Request, error: RequestValidationError) -> ApiError:
    """The error for the client whose body was refused."""
    field = getattr(request.scope.get("route"), "body_field", None)
    model = getattr(getattr(field, "field_info", None), "annotation", None)
    content_type = request.headers.get("content-type", "")
    return complaint(error.errors(), error.body, model, content_type=content_type)


def complaint(found: Sequence[Any], body: object, model: type[BaseModel] | None, *, content_type: str) -> ApiError:
    """The error for a client.

    Args:
        found: what pydantic found, at least one.
        body: as it was parsed; bytes if it was not JSON by its content type.
        model: of the body.
    """
    problems = [_problem(each, body) for each in found]
    worst = problems[0]
    if worst.branch is not None:
        worst = max((each for each in problems if each.branch == worst.branch), key=lambda each: each.rank)
    if not worst.path:
        return _whole(worst, body, content_type)
    if worst.kind == "extra_forbidden":
        return _unknown(worst.path, body, model)
    field = dotted(worst.path)
    message, code = _said(worst, problems)
    return ApiError(400, f"{field} {message}", param=field, code=code)


def dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _problem(found: Mapping[str, Any], body: object) -> _Problem:
    """Where a complaint belongs; names of pydantic's own in its path, of forms that it tried, are left out."""
    parts = found["loc"][1:]  # the first says that it is the body
    value: Any = body
    path: Path = ()
    branch: Path | None = None
    for place, part in enumerate(parts):
        absent = found["type"] == "missing" and place == len(parts) - 1
        if isinstance(value, dict) and (part in value or absent):
            path, value = (*path, part), value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            path, value = (*path, part), value[part]
        elif branch is None:
            branch = path
    return _Problem(found["type"], path, branch, value, found.get("ctx") or {})


def _whole(problem: _Problem, body: object, content_type: str) -> ApiError:
    """The body as such is wrong."""
    if isinstance(body, bytes) and body:
        given = f"is {shown(content_type)}" if content_type else "is not given"
        return ApiError(
            400, f"the body's content type {given}, it must be application/json", code="invalid_content_type"
        )
    if problem.kind == "missing" or body in (None, b""):
        return ApiError(400, "the body is empty or null, it must be a JSON object", code="invalid_type")
    return ApiError(400, f"the body must be a JSON object, got {shown(body)}", code="invalid_type")


def _said(problem: _Problem, problems: Sequence[_Problem]) -> tuple[str, str]:
    """What follows the field's name, and OpenAI's code."""
    kind, value, context = problem.kind, problem.value, problem.context
    if kind == "missing":
        return "is missing", "missing_required_parameter"
    if kind == "none_required":
        return f"is {shown(value)}, which is not supported here; leave it out", "unsupported_parameter"
    if kind in WANTED or kind == "literal_error":
        rivals = [each for each in problems if (each.path, each.branch) == (problem.path, problem.branch)]
        allowed = dict.fromkeys(_wanted(each) for each in rivals if each.of_type or each.kind == "literal_error")
        code = "invalid_value" if kind == "literal_error" else "invalid_type"
        return f"must be {' or '.join(allowed)}, got {shown(value)}", code
    if kind in BOUNDS:
        key, words, code = BOUNDS[kind]
        number = "integer" if isinstance(value, int) else "decimal"
        return f"is {shown(value)}, allowed is {words} {context[key]}", f"{number}_{code}_value"
    if kind in SIZES:
        key, words, things, code = SIZES[kind]
        return (
            f"has {len(value)} {things}, allowed is {words} {context[key]}",
            code if value else "empty_" + code.partition("_")[0],
        )
    if kind == "value_error":
        return str(context["error"]), "invalid_value"
    return f"cannot be {shown(value)}", "invalid_value"


def _wanted(problem: _Problem) -> str:
    return WANTED.get(problem.kind) or str(problem.context["expected"])


def _unknown(path: Path, body: object, model: type[BaseModel] | None) -> ApiError:
    """A field that does not exist; a near name that does, and that is not given too, is offered."""
    name, given = str(path[-1]), body
    for part in path[:-1]:
        given = given[part]  # type: ignore[index]
    known = {field for each in _models_at(model, path[:-1]) for field in _names(each)}
    free = sorted(known - set(given if isinstance(given, dict) else ()))
    near = get_close_matches(name, free, n=1, cutoff=NEAR)
    where = dotted(path[:-1]) or "this request"
    hint = f"; is {near[0]!r} meant?" if near else ""
    message = f"{shown(name)} is not a field of {where}{hint}"
    return ApiError(400, message, param=shortened(dotted(path)), code="unknown_parameter")


def shortened(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."


def _names(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if field.annotation is not NoneType:  # which is not supported
            yield field.alias or name


def _models_at(model: type[BaseModel] | None, path: Path) -> list[type[BaseModel]]:
    """Models that the value at a path may be of."""
    models = [] if model is None else [model]
    for part in path:
        if isinstance(part, str):
            fields = [
                field
                for each in models
                for name, field in each.model_fields.items()
                if part in (field.alias or name, name)
            ]
            models = [found for field in fields for found in _models_in(field.annotation)]
    return models


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
