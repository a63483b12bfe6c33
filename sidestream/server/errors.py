"""What a client is told when something goes wrong: OpenAI's error object, with the HTTP status that fits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from sidestream.errors import CapacityError, EngineDeadError, RequestError, SidestreamError

MAX_SHOWN = 120
"""Characters of a client's value that a message repeats."""
CLIENT_GONE = 499
"""Status of an answer that nobody reads any more; it appears in logs only."""


class ApiError(Exception):
    """An error for the client.

    Args:
        status: of the HTTP response.
        message: says what is wrong, with value and limit.
        kind: OpenAI's ``type``.
        param: the field at fault.
        code: OpenAI's ``code``, for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


class JSONAnswer(Response):
    """JSON in ASCII: half a surrogate pair in a client's own text cannot break the encoding."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def unavailable(message: str, code: str) -> ApiError:
    """503: not yet, or not any more."""
    return ApiError(503, message, kind="service_unavailable", code=code, headers={"Retry-After": "1"})


def as_api_error(error: Exception) -> ApiError:
    """The engine's own errors, as a client sees them."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return unavailable(str(error), "engine_dead")
    if isinstance(error, CapacityError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=_param(str(error)))
    return ApiError(500, "the server failed; its log says how", kind="server_error", code="internal_error")


def install(app: FastAPI) -> None:
    """Make every error of the app an OpenAI-shaped one."""

    async def known(request: Request, error: Exception) -> Response:
        return error_answer(as_api_error(error))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), f"{type(error)} is not a validation error"
        return error_answer(_invalid(error.errors(), _known_fields(request)))

    async def routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), f"{type(error)} is not an HTTP error"
        detail = str(error.detail)
        if error.status_code in (404, 405):
            detail = f"{request.method} {request.url.path}: {detail}"
        return error_answer(ApiError(error.status_code, detail, headers=error.headers))

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(SidestreamError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, routing)
    app.add_exception_handler(ClientGoneError, gone)
    app.add_exception_handler(Exception, known)


def error_answer(error: ApiError) -> Response:
    return JSONAnswer(error.body, status_code=error.status, headers=error.headers)


def shown(value: object) -> str:
    """A client's value, shortened."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def _invalid(problems: Sequence[Any], known: Sequence[str]) -> ApiError:
    """The first complaint about a body, with the field's path and its value."""
    problem = problems[0]
    path = [str(part) for part in problem["loc"] if part != "body"]
    if problem["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {problem.get('ctx', {}).get('error', problem['msg'])}")
    if problem["type"] == "extra_forbidden":
        near = get_close_matches(path[-1], known, n=1)
        hint = f"; is {near[0]!r} meant?" if near else ""
        message = f"{'.'.join(path)!r} is not a field of this request{hint}"
        return ApiError(400, message, param=path[0], code="unknown_parameter")
    if not path:
        return ApiError(400, f"the body must be a JSON object with content type application/json: {problem['msg']}")
    field = path[0]
    value = "" if problem["type"] == "missing" else f", got {shown(problem.get('input'))}"
    return ApiError(400, f"{'.'.join(path)}: {problem['msg']}{value}", param=field)


def _known_fields(request: Request) -> list[str]:
    """Names of the fields that the route's body has."""
    route = request.scope.get("route")
    body = getattr(route, "body_field", None)
    model = getattr(getattr(body, "field_info", None), "annotation", None)
    return list(getattr(model, "model_fields", {}))


def _param(message: str) -> str | None:
    """The field that the engine's message begins with, where it does."""
    first = message.split(" ", 1)[0]
    return first if first.isidentifier() and first not in ("the", "a", "request", "prompt") else None
