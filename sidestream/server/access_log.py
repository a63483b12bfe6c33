"""The access log: one line a request, once it is over. Nothing that the request or its answer said stands in it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidestream.core.request import FinishReason
from sidestream.engine.async_engine import Delta
from sidestream.engine.input_processor import ProcessedPrompt

QUIET_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/ledger", "/dashboard"})
"""What probes, scrapers and the dashboard ask for all the time."""

MAX_PATH = 200
"""Characters of a path that are shown."""


class Exchange:
    """A request and its answer on their way, as far as their line tells of them."""

    def __init__(self, method: str, path: str) -> None:
        self.status: int | None = None
        self._method = method
        self._path = quote(path)[:MAX_PATH]
        self._began = time.monotonic()
        self._name: str | None = None
        self._batch: Sequence[ProcessedPrompt] = ()
        self._cached: dict[int, int] = {}
        self._score_only = False
        self._generated = 0
        self._first: float | None = None
        self._reasons: Counter[str] = Counter()

    def runs(self, name: str, batch: Sequence[ProcessedPrompt], *, score_only: bool) -> None:
        """The engine is asked for the answer, whose id is ``name``; of ``score_only`` no token is counted."""
        self._name, self._batch, self._score_only = name, batch, score_only

    def token(self, delta: Delta) -> None:
        """A token came out."""
        if self._first is None:
            self._first = time.monotonic()
        self._generated += not self._score_only
        self._cached[delta.prompt_index] = delta.output.cached_tokens
        if delta.finish_reason is not None:
            self._reasons[str(delta.finish_reason)] += 1

    def line(self) -> str:
        """When it ended, what was asked, the status and the answer's id; of completions tokens, seconds and ends."""
        words = [
            datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            self._method,
            self._path,
            "-" if self.status is None else str(self.status),
            self._name or "-",
        ]
        if self._name is not None:
            words += [
                f"prompt={sum(len(prompt.token_ids) for prompt in self._batch)}",
                f"cached={sum(self._cached.values())}",
                f"output={self._generated}",
                "first=-" if self._first is None else f"first={self._first - self._began:.3f}s",
            ]
        words.append(f"whole={time.monotonic() - self._began:.3f}s")
        if self._name is not None:
            words.append(f"finish={self._finish()}")
        return " ".join(words)

    def _finish(self) -> str:
        """The reason of all completions, or how many had which; what did not end by itself was refused or aborted."""
        open_ones = sum(len(prompt.requests) for prompt in self._batch) - self._reasons.total()
        left = "refused" if self.status == 400 else str(FinishReason.ABORT)
        reasons = self._reasons + Counter({left: open_ones})
        if len(reasons) == 1:
            return next(iter(reasons))
        return ",".join(f"{reason}:{count}" for reason, count in sorted(reasons.items()))


_current: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


def current_exchange() -> Exchange | None:
    """That of the request which the running task answers; None where nothing is logged."""
    return _current.get()


class AccessLog:
    """Follows every request but those of ``QUIET_PATHS``.

    Args:
        say: told each line.
    """

    def __init__(self, app: ASGIApp, *, say: Callable[[str], None]) -> None:
        self._app = app
        self._say = say

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in QUIET_PATHS:
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope["method"], scope["path"])

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
            await send(message)

        before = _current.set(exchange)
        try:
            await self._app(scope, receive, noted)
        finally:
            _current.reset(before)
            self._say(exchange.line())
