"""Bodies as JSON, read strictly: what a client cannot have meant is refused before any field is looked at."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

from sidestream.server.errors import ApiError, WhileReadingError

MAX_DEPTH = 100
"""Objects and lists within each other. Python's own limit is lower in places that a body reaches later."""
MAX_NAMES = 65536
"""Of one object."""


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
        value = json.loads(body, object_pairs_hook=_object, parse_constant=_not_finite, parse_float=_float)
    except _NotFiniteError:
        _refuse_not_finite(json.loads(body))
    except json.JSONDecodeError as error:
        _refuse(f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}")
    except UnicodeDecodeError as error:
        _refuse(f"the body is not text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}")
    except RecursionError:
        _refuse(f"the body has more than {MAX_DEPTH} levels of objects and lists")
    except ValueError:
        _refuse("the body holds an integer of more digits than any field takes")
    _check_depth(body, value)
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
        _refuse(f"an object of the body has {len(pairs)} names, the limit is {MAX_NAMES}")
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        _refuse(f"{twice[:80]!a} stands twice in one object of the body", param=twice[:80])
    return made


def _refuse_not_finite(value: Any) -> NoReturn:
    """Name the field that holds a number which is none in JSON."""
    level: list[tuple[str, Any]] = [("", value)]
    while level:
        for path, item in level:
            if isinstance(item, float) and not math.isfinite(item):
                where = path or "the body"
                shown = json.dumps(item)
                _refuse(f"{where} is {shown}, which is not JSON: numbers must be finite", param=path or None)
        level = [
            (f"{path}.{name}".removeprefix("."), child)
            for path, item in level
            if isinstance(item, dict | list)
            for name, child in (item.items() if isinstance(item, dict) else enumerate(item))
        ]
    raise AssertionError("a number that is not finite was read once, and not again")


def _check_depth(body: bytes, value: Any) -> None:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            _refuse(f"the body has more than {MAX_DEPTH} levels of objects and lists")
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]


def _refuse(message: str, *, param: str | None = None) -> NoReturn:
    raise WhileReadingError(ApiError(400, message, param=param, code="invalid_json"))
