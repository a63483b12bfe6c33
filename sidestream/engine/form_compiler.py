"""Compiles what the text of requests must look like, beside the steps of an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Condition, Thread

from sidestream.core.request import Request

THREADS = 2
"""One form that takes long must not hold up all others."""


class FormCompiler:
    """Requests go in, and come out once their forms are compiled. Daemon threads do it: they hold up no exit.

    Args:
        prepare: the slow work for a request, called on several threads; what it raises goes with the request.
    """

    def __init__(self, prepare: Callable[[Request], None], *, threads: int = THREADS) -> None:
        self._prepare = prepare
        self._news = Condition()
        self._queue: deque[Request] = deque()
        self._wanted: dict[str, Request] = {}
        self._finished: list[tuple[Request, Exception | None]] = []
        for i in range(threads):
            Thread(target=self._work, name=f"forms-{i}", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Some request has not come out yet."""
        return bool(self._wanted)

    def submit(self, request: Request) -> None:
        with self._news:
            self._wanted[request.request_id] = request
            self._queue.append(request)
            self._news.notify()

    def cancel(self, request_id: str) -> bool:
        """Let a request go; whether it was here. A form that is being compiled is compiled for nobody."""
        with self._news:
            self._queue = deque(request for request in self._queue if request.request_id != request_id)
            return self._wanted.pop(request_id, None) is not None

    def take(self) -> list[tuple[Request, Exception | None]]:
        """Requests that are through, each with what it failed with."""
        with self._news:
            finished, self._finished = self._finished, []
            through = [(request, error) for request, error in finished if self._is_wanted(request)]
            for request, _ in through:
                del self._wanted[request.request_id]
        return through

    def _is_wanted(self, request: Request) -> bool:
        """It was not cancelled, nor another put in its place under the same id."""
        return self._wanted.get(request.request_id) is request

    def _work(self) -> None:
        while True:
            with self._news:
                while not self._queue:
                    self._news.wait()
                request = self._queue.popleft()
            error: Exception | None = None
            try:
                self._prepare(request)
            except Exception as raised:  # noqa: BLE001  whoever takes the request is told
                error = raised
            with self._news:
                self._finished.append((request, error))
