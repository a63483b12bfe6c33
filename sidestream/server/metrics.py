"""Prometheus metrics. Where one means what vLLM's does it has vLLM's name, so that existing dashboards work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from sidestream.core.request import FinishReason
from sidestream.engine.async_engine import Delta
from sidestream.engine.input_processor import ProcessedPrompt
from sidestream.engine.wire import EngineState, Ready

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
STEP_SIZES = tuple(1 << power for power in range(16))
NUMBERS = (1, 2, 5, 10, 20, 50, 100)
LABEL = "model_name"
HISPARSE = {
    "selected_rows": "Rows of host blocks that decodes selected.",
    "missed_rows": "Those of them that lay in no hot slot and were copied.",
    "spilled_blocks": "KV blocks copied to the host pool.",
    "spilled_bytes": "Bytes of those.",
    "restored_blocks": "KV blocks copied back while the device had room to spare.",
    "restored_bytes": "Bytes of those.",
    "staged_bytes": "Bytes copied back for prefills.",
    "free_device_blocks": "KV places free on the device.",
    "free_host_blocks": "KV places free in the host pool.",
}
"""What is said of a host pool, by its names in ``EngineState``."""


class Metrics:
    """What the server counts itself, and the engine's last report, in one registry."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts, when their first token came.")
        self.cached_tokens = self._counter("vllm:prompt_tokens_cached", "Those of them that came from a cache.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._finished = Counter(
            "vllm:request_success", "Completions ended.", [LABEL, "finished_reason"], registry=self.registry
        )
        self.first_token = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self.inter_token = self._histogram("vllm:inter_token_latency_seconds", "Between tokens of a completion.")
        self.whole = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.")
        self.queue = self._histogram("vllm:request_queue_time_seconds", "From joining the queue to the first step.")
        self.prefill = self._histogram("vllm:request_prefill_time_seconds", "From the first step to the first token.")
        self.decode = self._histogram("vllm:request_decode_time_seconds", "From the first token to the last.")
        self.inference = self._histogram(
            "vllm:request_inference_time_seconds", "From the first step to the last token."
        )
        self.per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean of a completion's times between tokens."
        )
        self.prompt_length = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.computed_length = self._histogram(
            "vllm:request_prefill_kv_computed_tokens", "Tokens of a prompt that no cache held.", TOKENS
        )
        self.output_length = self._histogram("vllm:request_generation_tokens", "Tokens of a completion.", TOKENS)
        self.asked_length = self._histogram("vllm:request_params_max_tokens", "The requests' max_tokens.", TOKENS)
        self.asked_number = self._histogram("vllm:request_params_n", "The requests' n.", NUMBERS)
        self._refused = Counter(
            "sidestream:requests_refused", "Requests answered with an error.", [LABEL, "status"], registry=self.registry
        )
        self._disconnected = self._counter("sidestream:requests_disconnected", "Requests whose client went away.")

    def follow(self, engine: Callable[[], tuple[Ready, EngineState] | None]) -> None:
        """Show the engine's reports too; ``engine`` gives the last one, or None while there is none."""
        self.registry.register(_EngineReports(self._model, engine))

    def finished(self, reason: FinishReason) -> None:
        self._finished.labels(self._model, str(reason)).inc()

    def refused(self, status: int) -> None:
        self._refused.labels(self._model, str(status)).inc()

    def disconnected(self) -> None:
        self._disconnected.inc()

    def tokens(self) -> tuple[int, int]:
        """Tokens so far, of prompts and generated."""
        names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        prompt, generated = (self.registry.get_sample_value(name, {LABEL: self._model}) or 0 for name in names)
        return int(prompt), int(generated)

    def text(self) -> bytes:
        """The whole registry in Prometheus's text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(name, about, [LABEL], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(name, about, [LABEL], registry=self.registry, buckets=buckets).labels(self._model)


class RequestClock:
    """Times of one completion, as its tokens come out.

    Args:
        prompt: whose completion number ``index`` this is.
        score_only: what is generated is not counted.
    """

    def __init__(self, metrics: Metrics, prompt: ProcessedPrompt, index: int, *, score_only: bool = False) -> None:
        self._metrics = metrics
        self._prompt = prompt
        self._index = index
        self._score_only = score_only
        self._arrived = self._began = self._first = self._last = time.monotonic()
        self._tokens = 0

    def token(self, delta: Delta) -> None:
        """A token came out."""
        now, metrics = time.monotonic(), self._metrics
        if self._tokens == 0:
            self._note_first(now, delta)
        else:
            metrics.inter_token.observe(now - self._last)
        self._last = now
        self._tokens += 1
        if not self._score_only:
            metrics.generation_tokens.inc()
        if delta.finish_reason is not None:
            metrics.decode.observe(now - self._first)
            metrics.inference.observe(now - self._began)
            if self._tokens > 1:
                metrics.per_token.observe((now - self._first) / (self._tokens - 1))
            self._end(delta.finish_reason)

    def dropped(self) -> None:
        """The request was aborted before its end."""
        self._end(FinishReason.ABORT)

    def _note_first(self, now: float, delta: Delta) -> None:
        metrics, length = self._metrics, len(self._prompt.token_ids)
        self._first = now
        self._began = min(self._arrived + delta.queue_seconds, now)
        metrics.first_token.observe(now - self._arrived)
        metrics.queue.observe(delta.queue_seconds)
        metrics.prefill.observe(now - self._began)
        metrics.prompt_tokens.inc(length)
        metrics.prompt_length.observe(length)
        metrics.cached_tokens.inc(delta.cached_tokens)
        metrics.computed_length.observe(length - delta.cached_tokens)

    def _end(self, reason: FinishReason) -> None:
        metrics, params = self._metrics, self._prompt.params
        metrics.whole.observe(time.monotonic() - self._arrived)
        metrics.output_length.observe(0 if self._score_only else self._tokens)
        if params.max_tokens is not None:
            metrics.asked_length.observe(0 if self._score_only else params.max_tokens)
        if self._index == 0:
            metrics.asked_number.observe(params.n)
        metrics.finished(reason)


class _EngineReports:
    """The engine's last report as metrics, made anew at every scrape."""

    def __init__(self, model: str, engine: Callable[[], tuple[Ready, EngineState] | None]) -> None:
        self._model = model
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        report = self._engine()
        if report is None:
            return
        ready, state = report
        used = 1 - state.free_blocks / ready.num_blocks if ready.num_blocks else 0.0
        yield self._gauge("vllm:num_requests_running", "Sequences in the running batch.", state.running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences in the queue.", state.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", used)
        yield self._counter("vllm:num_preemptions", "Times a sequence lost its memory.", state.preemptions)
        yield self._counter(
            "sidestream:recomputed_tokens", "Computed positions thrown away by that.", state.recomputed_tokens
        )
        yield self._counter(
            "sidestream:prefill_paced_steps", "Steps whose prefill was cut lest decodes wait.", state.paced_steps
        )
        yield self._counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", state.prefix_queries)
        yield self._counter("vllm:prefix_cache_hits", "Tokens taken over from it.", state.prefix_hits)
        yield self._step_sizes(state)
        yield self._counter(
            "sidestream:late_compilations", "Kernels compiled while a request waited for them.", state.late_compilations
        )
        yield self._by("sidestream:steps", "Steps by graph mode.", "mode", state.steps)
        yield self._by("sidestream:graph_fallbacks", "Steps without the graph asked for.", "reason", state.fallbacks)
        yield self._by("sidestream:host_waits", "Steps the host waited for.", "reason", state.waits)
        for name, value in state.hisparse.items():
            kind = self._gauge if name.startswith("free") else self._counter
            yield kind(f"sidestream:hisparse_{name}", HISPARSE[name], value)
        memory = GaugeMetricFamily("sidestream:memory_bytes", "Bytes held, by part.", labels=[LABEL, "part"])
        for part, size in ready.ledger["parts"].items():
            memory.add_metric([self._model, part], size["measured"])
        yield memory
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "Always 1.", labels=[LABEL, "block_size", "num_gpu_blocks"]
        )
        config.add_metric([self._model, str(ready.block_size), str(ready.num_blocks)], 1)
        yield config

    def _step_sizes(self, state: EngineState) -> Metric:
        """Steps by how many tokens they ran, prompts' and generated ones."""
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step.", labels=[LABEL])
        buckets, steps = [], 0
        for size in STEP_SIZES:
            steps += state.step_sizes.get(size, 0)
            buckets.append((f"{size}.0", steps))
        steps = sum(state.step_sizes.values())
        family.add_metric([self._model], [*buckets, ("+Inf", steps)], sum_value=state.num_tokens)
        return family

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, about, labels=[LABEL])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(name, about, labels=[LABEL])
        family.add_metric([self._model], value)
        return family

    def _by(self, name: str, about: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(name, about, labels=[LABEL, label])
        for key, value in values.items():
            family.add_metric([self._model, key], value)
        return family
