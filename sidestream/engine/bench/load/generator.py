"""Sends requests when they are due, so many at once at most, and collects what becomes of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from sidestream.engine.bench.load.openai_client import OpenAIClient
from sidestream.engine.bench.load.outcome import TIMEOUT, Answer, Failure, RequestFailed
from sidestream.engine.bench.workload import Job
from sidestream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoadRun:
    """All that was sent.

    Attributes:
        outcomes: of each job, in order.
        delays: seconds between the moment at which each request was due and that at which it went out: for want of a
            free place, a connection or the client's own time. Latencies do not hold it. Requests that never went out
            have none.
        seconds: from the start to the end of the last request.
    """

    outcomes: tuple[Answer | Failure, ...]
    delays: tuple[float, ...]
    seconds: float

    @property
    def answers(self) -> list[Answer]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Answer)]

    @property
    def failures(self) -> list[Failure]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Failure)]

    @property
    def max_in_flight(self) -> int:
        """Requests that were open at one moment."""
        spans = [(a.times.sent, a.times.finished) for a in self.answers]
        spans += [(failure.sent, failure.finished) for failure in self.failures if failure.sent is not None]
        changes = sorted([(sent, 1) for sent, _ in spans] + [(finished, -1) for _, finished in spans])
        most = now = 0
        for _, change in changes:
            now += change
            most = max(most, now)
        return most


async def generate_load(
    client: OpenAIClient,
    jobs: Sequence[Job],
    due: Sequence[float],
    *,
    max_concurrency: int | None = None,
    timeout: float | None = None,
    on_outcome: Callable[[Answer | Failure], None] = lambda outcome: None,
) -> LoadRun:
    """Send every job.

    Args:
        due: seconds from the start, ascending, one a job.
        max_concurrency: requests open at once; those that are due wait, first come first served. None is no limit.
        timeout: seconds that a request may take from its connection to its end.
        on_outcome: told of each as it comes.
    """
    if max_concurrency is not None and max_concurrency < 1:
        raise ConfigError(f"max_concurrency is {max_concurrency}, at least 1 is needed")
    if timeout is not None and not timeout > 0:
        raise ConfigError(f"timeout is {timeout}, more than 0 is needed")
    places = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    began = time.perf_counter()
    delays: list[float] = []

    async def one(job: Job, moment: float) -> Answer | Failure:
        sent: float | None = None

        def went_out(at: float) -> None:
            nonlocal sent
            sent = at
            delays.append(at - began - moment)

        async with places:
            try:
                async with asyncio.timeout(timeout):
                    outcome: Answer | Failure = await client.ask(job, on_sent=went_out)
            except RequestFailed as error:
                outcome = Failure(error.kind, error.message, sent, time.perf_counter())
            except TimeoutError:
                outcome = Failure(TIMEOUT, f"after {timeout} s", sent, time.perf_counter())
        on_outcome(outcome)
        return outcome

    tasks = []
    async with asyncio.TaskGroup() as group:
        for job, moment in zip(jobs, due, strict=True):
            if (wait := began + moment - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(job, moment)))
    return LoadRun(tuple(task.result() for task in tasks), tuple(delays), time.perf_counter() - began)
