"""One measurement of a server: learn its model, fit prompts to it, warm up, generate the load."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sidestream.engine.bench.cutters import CountingCutter, RatioCutter, TokenizerCutter
from sidestream.engine.bench.load.arrivals import arrival_times
from sidestream.engine.bench.load.generator import LoadRun, generate_load
from sidestream.engine.bench.load.http_client import looked_up
from sidestream.engine.bench.load.objectives import Objectives
from sidestream.engine.bench.load.openai_client import CHAT, OpenAIClient
from sidestream.engine.bench.load.outcome import Answer, Failure
from sidestream.engine.bench.load.report import ServeReport
from sidestream.engine.bench.workload import Cutter, Job, Workload
from sidestream.errors import ConfigError, SidestreamError

PROBE_CHARACTERS = (200, 1000)
"""Of the two prompts by which a server's tokens a character are found."""
PROBE_PASSAGE = 1 << 20
"""Number of a passage that no workload comes to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """How a workload is sent.

    Attributes:
        request_rate: requests a second, as a Poisson process; infinity sends all at once.
        max_concurrency: requests open at once; None is no limit.
        timeout: seconds that one may take.
        num_warmups: requests before those that are measured, with prompts of their own.
        objectives: of goodput.
        vocab_size: of random token ids.
        tokenizer: the model's, to cut prompts with; without it the server is asked: at ``/tokenize`` where it has that,
            otherwise for the counts of two short prompts.
    Raises:
        ConfigError: naming the option, its value and what is allowed.
    """

    request_rate: float = math.inf
    max_concurrency: int | None = None
    timeout: float = 600.0
    num_warmups: int = 4
    objectives: Objectives
    vocab_size: int | None = None
    tokenizer: Any | None = None

    def __post_init__(self) -> None:
        arrival_times(1, self.request_rate, seed=0)
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency is {self.max_concurrency}, at least 1 is needed")
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"timeout is {self.timeout}, more than 0 seconds are needed")
        if self.num_warmups < 0:
            raise ConfigError(f"num_warmups is {self.num_warmups}, at least 0 is needed")

    def as_json(self) -> dict[str, Any]:
        return {
            "request_rate": "inf" if math.isinf(self.request_rate) else self.request_rate,
            "max_concurrency": self.max_concurrency,
            "num_warmups": self.num_warmups,
            "timeout_s": self.timeout,
        }


async def measure(
    client: OpenAIClient,
    workload: Workload,
    settings: LoadSettings,
    *,
    on_phase: Callable[[str, int], None] = lambda name, count: None,
    on_outcome: Callable[[Answer | Failure], None] = lambda outcome: None,
) -> ServeReport:
    """Measure a server.

    Args:
        client: whose model may be "": the server's first is taken then.
        on_phase: told of "warming up" and "measuring", and how many requests each has.
        on_outcome: told of each request.
    Raises:
        ConfigError, SidestreamError: it cannot be measured as asked. Failed requests are figures of the report.
    """
    check(client, workload, settings)
    try:
        async with asyncio.timeout(settings.timeout):
            client = replace(client, address=await looked_up(client.address))
            models, version = await client.models(), await client.version()
    except TimeoutError:
        raise SidestreamError(f"{client.address}/v1/models does not answer within {settings.timeout} s") from None
    except OSError as error:
        raise SidestreamError(f"{client.address} cannot be reached: {error}") from None
    if not client.model:
        if not models:
            raise ConfigError(f"{client.address} lists no models; give --served-model-name")
        client = replace(client, model=models[0]["id"])
    cutter = None if workload.dataset == "random-ids" else await _cutter(client, workload, settings)
    warm, jobs = await asyncio.to_thread(
        workload.jobs, cutter=cutter, vocab_size=settings.vocab_size, warm_ups=settings.num_warmups
    )

    async def load(part: Sequence[Job], due: Sequence[float]) -> LoadRun:
        return await generate_load(
            client,
            part,
            due,
            max_concurrency=settings.max_concurrency,
            timeout=settings.timeout,
            on_outcome=on_outcome,
        )

    if warm:
        on_phase("warming up", len(warm))
        tried = await load(warm, [0.0] * len(warm))
        if not tried.answers:
            failure = tried.failures[0]
            raise SidestreamError(f"no request of the warm-up was answered: {failure.kind}: {failure.message}")
    on_phase("measuring", len(jobs))
    run = await load(jobs, arrival_times(len(jobs), settings.request_rate, seed=workload.seed))
    owner = next((entry.get("owned_by") for entry in models if entry["id"] == client.model), None)
    server = {"url": str(client.address), "endpoint": client.endpoint, "model": client.model, "owned_by": owner}
    server["server_version"] = version
    asked = {"ignore_eos": client.ignore_eos, "temperature": client.temperature, "extra_body": dict(client.extra)}
    return ServeReport(run, server, workload.as_json() | settings.as_json() | asked, settings.objectives)


def check(client: OpenAIClient, workload: Workload, settings: LoadSettings) -> None:
    """See that the parts go together.

    Raises:
        ConfigError: they do not.
    """
    if workload.dataset == "random-ids":
        if client.endpoint == CHAT:
            raise ConfigError(f"dataset is 'random-ids', and {CHAT} takes no token ids; use /v1/completions")
        if settings.vocab_size is None:
            raise ConfigError("dataset is 'random-ids', which needs --vocab-size, or --tokenizer")


async def _cutter(client: OpenAIClient, workload: Workload, settings: LoadSettings) -> Cutter:
    if settings.tokenizer is not None:
        return TokenizerCutter(settings.tokenizer)
    if await _count(client, "a", settings) is not None:
        loop = asyncio.get_running_loop()

        def count(text: str) -> int:  # called from a thread of its own, while the loop runs
            found = asyncio.run_coroutine_threadsafe(_count(client, text, settings), loop).result()
            if found is None:
                raise SidestreamError(
                    f"{client.address}/tokenize does not count {len(text)} characters; give --tokenizer"
                )
            return found

        return CountingCutter(count)
    points = []
    for characters in PROBE_CHARACTERS:
        text = workload.source().passage(PROBE_PASSAGE, characters)[:characters]
        (answer,) = (await generate_load(client, [Job(text, 1)], [0.0], timeout=settings.timeout)).outcomes
        if isinstance(answer, Failure):
            where = f"{client.address}{client.endpoint}"
            raise SidestreamError(f"{where} does not answer a short prompt: {answer.kind}: {answer.message}")
        if answer.times.prompt_tokens is None:
            raise ConfigError(f"{client.address} counts no prompt tokens; give --tokenizer to make prompts of a length")
        points.append((len(text), answer.times.prompt_tokens))
    return RatioCutter.fitted(*points)


async def _count(client: OpenAIClient, text: str, settings: LoadSettings) -> int | None:
    try:
        async with asyncio.timeout(settings.timeout):
            return await client.count_tokens(text)
    except TimeoutError:
        raise SidestreamError(f"{client.address}/tokenize does not answer within {settings.timeout} s") from None
