"""What a client is told when something goes wrong: OpenAI's error object, with the HTTP status that fits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from sidestream.errors import CapacityError, EngineDeadError, RequestError, SidestreamError
from sidestream.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

MAX_SHOWN = 120
"""Characters of a client's value that a message repeats."""
BODIES = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
FIELDS = frozenset(name for body in BODIES for name in body.model_fields)
FIELD_AT_START = re.compile(r"(?:the )?([a-z_]+(?:\.\w+)*)")
ROUTING = {404: "not_found", 405: "method_not_allowed"}
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


class WhileReadingError(HTTPException):
    """Carries an error out of the reading of a body, where the framework passes on HTTP errors alone."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.status, str(error))
        self.error = error


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


def as_api_error(error: Exception, *, names: Mapping[str, str] | None = None) -> ApiError:
    """The engine's own errors, as a client sees them.

    Args:
        names: fields as the engine calls them, to what the client called them.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return unavailable(str(error), "engine_dead")
    if isinstance(error, CapacityError):
        error = RequestError(str(error), param="prompt", code="context_length_exceeded")
    if isinstance(error, RequestError):
        message = str(error)
        param, code = error.param or _param(message), error.code or "invalid_value"
        for name, known in (names or {}).items():
            param = known if param == name else param
            if name != "prompt":  # which is a word too
                message = re.sub(rf"\b{name}\b", known, message)
        return ApiError(400, message, param=param, code=code)
    return ApiError(500, "the server failed; its log says how", kind="server_error", code="internal_error")


def install(app: FastAPI, *, invalid: Callable[[Request, RequestValidationError], ApiError]) -> None:
    """Make every error of the app an OpenAI-shaped one; ``invalid`` words what is wrong with a body."""

    async def known(request: Request, error: Exception) -> Response:
        return error_answer(as_api_error(error))

    async def unfit(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), f"{type(error)} is not a validation error"
        return error_answer(invalid(request, error))

    async def routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), f"{type(error)} is not an HTTP error"
        if isinstance(error, WhileReadingError):
            return error_answer(error.error)
        detail = str(error.detail)
        if error.status_code in (404, 405):
            detail = f"{request.method} {shown(request.url.path)}: {detail}"
        return error_answer(
            ApiError(error.status_code, detail, headers=error.headers, code=ROUTING.get(error.status_code))
        )

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(SidestreamError, known)
    app.add_exception_handler(RequestValidationError, unfit)
    app.add_exception_handler(HTTPException, routing)
    app.add_exception_handler(ClientGoneError, gone)
    app.add_exception_handler(Exception, known)


def error_answer(error: ApiError) -> Response:
    return JSONAnswer(error.body, status_code=error.status, headers=error.headers)


def shown(value: object) -> str:
    """A client's value as it wrote it, shortened; text in single quotes."""
    if isinstance(value, str):
        text = repr(value[:MAX_SHOWN])
        whole = len(value) <= MAX_SHOWN
    elif isinstance(value, dict | list | int | float | None):
        text, whole = _start_of_json(value)
    else:
        text, whole = repr(value), True
    return text if whole and len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def _start_of_json(value: object) -> tuple[str, bool]:
    """As much JSON as is shown, and whether that is all."""
    text = ""
    for piece in json.JSONEncoder().iterencode(value):
        text += piece[:MAX_SHOWN]
        if len(text) > MAX_SHOWN:
            return text, False
    return text, True


def _param(message: str) -> str | None:
    """The field that the engine's message begins with, where it does."""
    found = FIELD_AT_START.match(message)
    return found[1] if found and found[1].partition(".")[0] in FIELDS else None
