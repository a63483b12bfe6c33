"""Compiles what the text of requests must look like, beside the steps of an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Any

from sidestream.core.request import Request
from sidestream.core.structured_outputs import StructuredOutputs
from sidestream.engine.form_trials import Attempt, CancelledAttemptError, TooSlowError

THREADS = 2
"""For quick forms, and again for slow ones: these wait for each other, and quick ones for none of them."""
QUICK_SECONDS = 1.0
"""That a form may take among the quick ones; beyond it is begun anew among the slow."""


@dataclass(eq=False, slots=True)
class _Job:
    """A form, and who waits for it."""

    form: StructuredOutputs
    requests: dict[str, Request] = field(default_factory=dict)
    attempt: Attempt = field(default_factory=Attempt)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A request that is through.

    Attributes:
        grammar: what its form was compiled to; None with an error.
    """

    request: Request
    grammar: Any
    error: Exception | None


class FormCompiler:
    """Requests go in, and come out once their forms are compiled. Daemon threads do it: they hold up no exit.

    Requests of one form wait for the same work, which ends when the last of them is cancelled.

    Args:
        prepare: the slow work for a form, called on several threads; what it raises goes with the requests, but for
            ``TooSlowError`` of an attempt whose seconds are limited.
        known: whether a form has passed its trial before: it waits for no trial of others then.
        threads: for quick forms, and as many for slow ones.
    """

    def __init__(
        self,
        prepare: Callable[[StructuredOutputs, Attempt], Any],
        *,
        known: Callable[[StructuredOutputs], bool] = lambda form: False,
        threads: int = THREADS,
        quick: float = QUICK_SECONDS,
    ) -> None:
        self._prepare = prepare
        self._is_known = known
        self._news = Condition()
        self._quick: deque[_Job] = deque()
        self._slow: deque[_Job] = deque()
        self._known: deque[_Job] = deque()
        self._jobs: dict[StructuredOutputs, _Job] = {}
        self._wanted: dict[str, Request] = {}
        self._finished: list[Compiled] = []
        for name, queue, seconds, count in (
            ("quick", self._quick, quick, threads),
            ("slow", self._slow, None, threads),
            ("known", self._known, None, 1),
        ):
            for i in range(count):
                Thread(target=self._work, args=(queue, seconds), name=f"forms-{name}-{i}", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Some request has not come out yet."""
        return bool(self._wanted)

    def submit(self, request: Request) -> None:
        form = request.params.structured_outputs
        assert form is not None, f"{request.request_id} has no form"
        with self._news:
            self._wanted[request.request_id] = request
            if form not in self._jobs:
                self._jobs[form] = _Job(form)
                (self._known if self._is_known(form) else self._quick).append(self._jobs[form])
                self._news.notify_all()
            self._jobs[form].requests[request.request_id] = request

    def cancel(self, request_id: str) -> bool:
        """Let a request go; whether it was here."""
        with self._news:
            request = self._wanted.pop(request_id, None)
            if request is None:
                return False
            form = request.params.structured_outputs
            assert form is not None, f"{request_id} has no form"
            job = self._jobs.get(form)
            if job is not None and job.requests.pop(request_id, None) is not None and not job.requests:
                del self._jobs[form]
                for queue in (self._quick, self._slow, self._known):
                    if job in queue:
                        queue.remove(job)
                job.attempt.cancel()
        return True

    def close(self) -> None:
        """Let all go: nothing is begun any more, and trials end."""
        for request_id in list(self._wanted):
            self.cancel(request_id)

    def take(self) -> list[Compiled]:
        """Requests that are through."""
        with self._news:
            finished, self._finished = self._finished, []
            through = [one for one in finished if self._wanted.get(one.request.request_id) is one.request]
            for one in through:
                del self._wanted[one.request.request_id]
        return through

    def _work(self, queue: deque[_Job], seconds: float | None) -> None:
        while True:
            with self._news:
                while not queue:
                    self._news.wait()
                job = queue.popleft()
                job.attempt = Attempt(seconds)
            grammar, error = None, None
            try:
                grammar = self._prepare(job.form, job.attempt)
            except CancelledAttemptError:
                continue
            except Exception as raised:  # noqa: BLE001  whoever takes the requests is told
                error = raised
            with self._news:
                if self._jobs.get(job.form) is not job:
                    continue  # cancelled
                if isinstance(error, TooSlowError):
                    self._slow.append(job)
                    self._news.notify_all()
                    continue
                del self._jobs[job.form]
                self._finished += [Compiled(request, grammar, error) for request in job.requests.values()]
