"""What is refused before a request is looked at: bodies that are too large, and callers without the key."""

from __future__ import annotations

import hmac
import re
from hashlib import sha256

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidestream.server.errors import ApiError, WhileReadingError, error_answer

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/dashboard"})
"""What probes, scrapers and browsers read without a key; nothing of a request's content is there."""
BEARER = re.compile(rb"bearer +(.+?) *", re.IGNORECASE)
"""Names of HTTP schemes are the same in either case (RFC 9110, 11.1)."""
PATIENCE = 8
"""Times the limit that is read of a body before the connection is closed on its sender."""


class ApiKey:
    """Asks every other path for ``Authorization: Bearer KEY``."""

    def __init__(self, app: ASGIApp, *, key: str) -> None:
        self._app = app
        self._digest = sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope["type"] == "http" and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS"
        if asked and not self._is_right(dict(scope["headers"]).get(b"authorization", b"")):
            error = ApiError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_answer(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_right(self, given: bytes) -> bool:
        """Digests are compared, in a time that says nothing of the key, nor of its length."""
        match = BEARER.fullmatch(given)
        return match is not None and hmac.compare_digest(sha256(match[1]).digest(), self._digest)


class BodyLimit:
    """Answers 413 to a body of more than ``limit`` bytes, declared or sent."""

    def __init__(self, app: ASGIApp, *, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._limit:
            await self._read_on(receive)
            await error_answer(self._too_large(int(declared)))(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._limit:
                raise WhileReadingError(self._too_large(read))
            return message

        await self._app(scope, counted, send)

    async def _read_on(self, receive: Receive) -> None:
        """Take some of a body that is refused: most clients look at the answer only once they have sent it all."""
        left = PATIENCE * self._limit
        while left > 0:
            message = await receive()
            if not message.get("more_body", False):
                return
            left -= len(message["body"])

    def _too_large(self, size: int) -> ApiError:
        message = f"the body has {size} bytes or more, the limit is {self._limit} (max_body_bytes)"
        return ApiError(413, message, code="request_too_large")
