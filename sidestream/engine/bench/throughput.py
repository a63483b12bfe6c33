"""Offline throughput: a workload given to the engine at once, from text to text, several times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.bench.cutters import TokenizerCutter
from sidestream.engine.bench.environment import device_name, origin
from sidestream.engine.bench.request_times import Latencies, Rates, RequestTimes
from sidestream.engine.bench.summary import Spread
from sidestream.engine.bench.workload import Job, Workload
from sidestream.engine.llm import LLM
from sidestream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ThroughputRun:
    """One repeat. Every request is asked at the start, so that a time to the first token has its wait in it."""

    rates: Rates
    latencies: Latencies

    def as_json(self) -> dict[str, Any]:
        return {**self.rates.as_json(), **self.latencies.as_json()}

    def __str__(self) -> str:
        rates, total = self.rates, self.rates.total_tokens_per_s
        assert total is not None
        latencies = ", ".join(f"{name} {figures.p50:.1f}" for name, figures in self.latencies.items() if name != "e2e")
        return (
            f"{rates.requests} requests in {rates.seconds:.2f} s: {rates.requests_per_s:.2f} requests/s, "
            f"{rates.output_tokens_per_s:,.0f} output tokens/s, {total:,.0f} in all; medians in ms: {latencies}"
        )


@dataclass(frozen=True, slots=True)
class ThroughputReport:
    """Repeats of one workload on one engine.

    Attributes:
        model: what was measured, for people.
    """

    model: str
    llm: LLM
    workload: Workload
    settings: dict[str, Any]
    runs: tuple[ThroughputRun, ...]

    @property
    def spreads(self) -> dict[str, Spread]:
        """Over the repeats, by figure; latencies are each repeat's own percentile, in ms."""
        figures: dict[str, list[float]] = {}
        for run in self.runs:
            total = run.rates.total_tokens_per_s
            assert total is not None
            figures.setdefault("requests_per_s", []).append(run.rates.requests_per_s)
            figures.setdefault("output_tokens_per_s", []).append(run.rates.output_tokens_per_s)
            figures.setdefault("total_tokens_per_s", []).append(total)
            for name, summary in run.latencies.items():
                for point in ("mean", "p50", "p90", "p99"):
                    figures.setdefault(f"{name}_{point}_ms", []).append(getattr(summary, point))
        return {name: Spread.of(values) for name, values in figures.items()}

    def as_json(self) -> dict[str, Any]:
        """Plain data; times in ms where a name says so, rates a second."""
        config = self.llm.built.config
        return {
            "kind": "throughput",
            "model": self.model,
            **origin(),
            "device": device_name(config.device),
            "mode": config.cudagraph_mode,
            "dtype": config.dtype,
            "kv_cache_dtype": config.kv_cache_dtype,
            "workload": self.workload.as_json() | self.settings,
            "compiled_after_ready": list(self.llm.built.compiled_after_ready()),
            "repeats": {name: spread.as_json() for name, spread in self.spreads.items()},
            "runs": [run.as_json() for run in self.runs],
        }


def jobs_for(
    llm: LLM, workload: Workload, *, warm_ups: int, tokenizer: Any | None = None
) -> tuple[list[Job], list[Job]]:
    """Jobs to warm up with and to measure, with prompts that the engine's model can take.

    Args:
        tokenizer: for a model that has none; its prompts are token ids then.
    Raises:
        ConfigError: the workload is text, and there is no tokenizer.
    """
    if workload.dataset == "random-ids":
        return workload.jobs(cutter=None, vocab_size=llm.built.config.model.vocab_size, warm_ups=warm_ups)
    words = llm.tokenizer if llm.tokenizer is not None else tokenizer
    if words is None:
        raise ConfigError(
            f"dataset is {workload.dataset!r}, and the model has no tokenizer; give --tokenizer FOLDER, or "
            "--dataset random-ids"
        )
    warm, jobs = workload.jobs(cutter=TokenizerCutter(words), vocab_size=None, warm_ups=warm_ups)
    if llm.tokenizer is not None:
        return warm, jobs
    ids = [[Job(tuple(words(job.prompt).input_ids), job.output_len) for job in part] for part in (warm, jobs)]
    return ids[0], ids[1]


def run(llm: LLM, jobs: Sequence[Job], *, temperature: float = 0.0) -> ThroughputRun:
    """Give all jobs to the engine at once; nothing but its length ends an answer."""
    prompts = [job.prompt if isinstance(job.prompt, str) else list(job.prompt) for job in jobs]
    params = [SamplingParams(temperature=temperature, max_tokens=job.output_len, ignore_eos=True) for job in jobs]
    arrivals: list[list[float]] = [[] for _ in jobs]
    finished: dict[int, RequestTimes] = {}
    began = time.perf_counter()
    for delta in llm.stream(prompts, params):
        now = time.perf_counter()
        index, output = delta.prompt_index, delta.output
        if delta.num_tokens > len(arrivals[index]):
            arrivals[index].append(now)
        if output.finished:
            finished[index] = RequestTimes(
                sent=began,
                arrivals=tuple(arrivals[index]),
                finished=now,
                completion_tokens=delta.num_tokens,
                prompt_tokens=len(output.prompt_token_ids),
                cached_tokens=output.cached_tokens,
            )
    seconds = time.perf_counter() - began
    assert len(finished) == len(jobs), f"{len(finished)} of {len(jobs)} requests finished"
    requests = [finished[index] for index in range(len(jobs))]
    return ThroughputRun(Rates.of(requests, seconds), Latencies.of(requests))


def measure(
    llm: LLM,
    workload: Workload,
    warm: Sequence[Job],
    jobs: Sequence[Job],
    *,
    model: str,
    repeats: int,
    temperature: float = 0.0,
    on_run: Callable[[ThroughputRun], None] = lambda run: None,
) -> ThroughputReport:
    """Warm up, then run the same jobs several times.

    Args:
        llm: without a prefix cache, or every repeat but the first would find what the first computed.
        on_run: told of each repeat.
    """
    assert not llm.built.config.prefix_caching
    if warm:
        run(llm, warm, temperature=temperature)
    runs = []
    for _ in range(repeats):
        runs.append(run(llm, jobs, temperature=temperature))
        on_run(runs[-1])
    settings = {"repeats": repeats, "num_warmups": len(warm), "temperature": temperature}
    settings["max_num_seqs"] = llm.built.config.max_num_seqs
    settings["max_num_batched_tokens"] = llm.built.config.max_num_batched_tokens
    return ThroughputReport(model, llm, workload, settings, tuple(runs))
