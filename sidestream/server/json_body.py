"""Bodies as JSON, read strictly: what a client cannot have meant is refused before any field is looked at."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

from sidestream.errors import RequestError
from sidestream.server.errors import ApiError, WhileReadingError

MAX_DEPTH = 100
"""Objects and lists within each other. Python's own limit is lower in places that a body reaches later."""
MAX_NAMES = 65536
"""Of one object."""
BODY = "the body"


class JSONRoute(APIRoute):
    """A route whose body is read by ``parsed``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_JSONRequest(request.scope, request.receive))

        return strict


class _JSONRequest(Request):
    async def json(self) -> Any:
        return parsed(await self.body())


def parsed(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        WhileReadingError: 400, it is no JSON, or holds NaN, a name twice, or too many levels or names.
    """
    try:
        return _parsed(body, BODY)
    except RequestError as error:
        param, code = error.param, error.code
        raise WhileReadingError(ApiError(400, str(error), param=param, code=code)) from None


def check_json(text: str, name: str) -> None:
    """RequestError if a field's text is no JSON by the same rules."""
    try:
        _parsed(text.encode(), name)
    except RequestError as error:
        raise RequestError(str(error), param=name) from None


def _parsed(body: bytes, what: str) -> Any:
    try:
        value = json.loads(body, object_pairs_hook=_object, parse_constant=_not_finite, parse_float=_float)
    except _NotFiniteError:
        _refuse_not_finite(json.loads(body), what)
    except json.JSONDecodeError as error:
        _refuse(f"{what} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}")
    except UnicodeDecodeError as error:
        _refuse(f"{what} is not text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}")
    except RecursionError:
        _refuse(f"{what} has more than {MAX_DEPTH} levels of objects and lists")
    except RequestError as error:
        _refuse(f"{what} {error}", param=error.param)
    except ValueError:
        _refuse(f"{what} holds an integer of more digits than any field takes")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deep(value):
        _refuse(f"{what} has more than {MAX_DEPTH} levels of objects and lists")
    return value


class _NotFiniteError(Exception):
    pass


def _not_finite(constant: str) -> NoReturn:
    raise _NotFiniteError(constant)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _NotFiniteError(text)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_NAMES:
        _refuse(f"holds an object of {len(pairs)} names, the limit is {MAX_NAMES}")
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        _refuse(f"holds {twice[:80]!a} twice in one object", param=twice[:80])
    return made


def _refuse_not_finite(value: Any, what: str) -> NoReturn:
    """Name the field that holds a number which is none in JSON."""
    level: list[tuple[str, Any]] = [("", value)]
    while level:
        for path, item in level:
            if isinstance(item, float) and not math.isfinite(item):
                shown = json.dumps(item)
                where = path if path and what == BODY else f"{what}.{path}".removesuffix(".")
                _refuse(f"{where} is {shown}, which is not JSON: numbers must be finite", param=path or None)
        level = [
            (f"{path}.{name}".removeprefix("."), child)
            for path, item in level
            if isinstance(item, dict | list)
            for name, child in (item.items() if isinstance(item, dict) else enumerate(item))
        ]
    raise AssertionError("a number that is not finite was read once, and not again")


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
    return bool(level)


def _refuse(message: str, *, param: str | None = None) -> NoReturn:
    raise RequestError(message, param=param, code="invalid_json")
