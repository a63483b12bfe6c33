"""``/metrics`` as Prometheus reads it, against what was asked of the server."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from sidestream.cache.hisparse import HiSparseStats
from sidestream.engine.wire import EngineState
from sidestream.server.metrics import HISPARSE, Metrics
from tests.server.live_server import LiveServer, live_server

PROMPT = "Question: What is 12 + 30?\nAnswer:"
COUNTED = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_success_total",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_prefill_time_seconds_count",
    "vllm:request_decode_time_seconds_count",
    "vllm:request_inference_time_seconds_count",
    "vllm:request_time_per_output_token_seconds_count",
    "vllm:request_prefill_kv_computed_tokens_count",
    "vllm:request_params_max_tokens_count",
    "vllm:request_params_n_sum",
)
VLLM = {
    "counter": """generation_tokens num_preemptions prefix_cache_hits prefix_cache_queries prompt_tokens
        prompt_tokens_cached request_success""",
    "gauge": "cache_config_info kv_cache_usage_perc num_requests_running num_requests_waiting",
    "histogram": """e2e_request_latency_seconds inter_token_latency_seconds iteration_tokens_total
        request_decode_time_seconds request_generation_tokens request_inference_time_seconds request_params_max_tokens
        request_params_n request_prefill_kv_computed_tokens request_prefill_time_seconds request_prompt_tokens
        request_queue_time_seconds request_time_per_output_token_seconds time_to_first_token_seconds""",
}
"""Names that dashboards made for vLLM ask for."""
PARTS = ("queue", "prefill", "decode", "inference")
SECONDS = "vllm:request_{}_time_seconds_sum"


def counts(server: LiveServer) -> dict[str, float]:
    return {name: server.metric(name) for name in COUNTED}


def test_the_page_parses_and_every_sample_names_the_model(server: LiveServer) -> None:
    _, text = server.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert families[name].type == "gauge"
    vllm = {f"vllm:{name}": kind for kind, names in VLLM.items() for name in names.split()}
    kinds = {name: family.type for name, family in families.items() if re.fullmatch("vllm:.*(?<!_created)", name)}
    assert kinds == vllm
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    own = [name for name in families if name.startswith("sidestream:") and not name.endswith("_created")]
    assert [name for name in (*vllm, *own) if name.partition(":")[2] not in page] == [], "documented"
    assert not any(sample.name.endswith("_total_total") for family in families.values() for sample in family.samples)
    for family in families.values():
        assert family.documentation
        assert all(sample.labels["model_name"] == "glm5-next-tiny" for sample in family.samples)


def test_no_family_and_no_sample_comes_twice(server: LiveServer) -> None:
    """A host pool's, which this server has not, are in the second text."""
    state = EngineState(hisparse=dict.fromkeys(HISPARSE, 1), steps={"NONE": 1}, fallbacks={"a": 1}, waits={"b": 1})
    for text in (server.get("/metrics")[1], _text_of_state(state)):
        lines = text.splitlines()
        names = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
        samples = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
        assert [name for name, times in Counter([*names, *samples]).items() if times > 1] == []
        assert len(names) > len(VLLM)


def _of_state(state: EngineState) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(_text_of_state(state))}


def _text_of_state(state: EngineState) -> str:
    """The page of a server whose engine reported this."""
    ready = SimpleNamespace(num_blocks=9, block_size=64, ledger={"parts": {}})
    metrics = Metrics("m")
    metrics.follow(lambda: (ready, state))  # type: ignore[arg-type, return-value]
    return metrics.text().decode()


def test_a_host_pool_is_reported_where_there_is_one(server: LiveServer) -> None:
    assert "hisparse" not in server.get("/metrics")[1]
    counters = {"spilled_blocks": 3, "spilled_bytes": 4096, "missed_rows": 7, "free_host_blocks": 5}
    families = _of_state(EngineState(hisparse=counters))
    assert families["sidestream:hisparse_spilled_bytes"].type == "counter"
    assert families["sidestream:hisparse_spilled_bytes"].samples[0].value == 4096
    assert families["sidestream:hisparse_free_host_blocks"].type == "gauge"
    assert {field.name for field in fields(HiSparseStats)} == set(HISPARSE), "each is known by name"


def test_a_server_with_a_host_pool_reports_it() -> None:
    with live_server("--hisparse-host-memory", "32MiB", "--num-blocks", "40") as server:
        server.await_ready()
        _, text = server.get("/metrics")
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert families["sidestream:hisparse_free_host_blocks"].samples[0].value > 0
        assert {f"sidestream:hisparse_{name}" for name in HISPARSE} <= set(families)


def test_tokens_and_requests_are_counted_once(server: LiveServer) -> None:
    server.await_idle()
    before = counts(server)
    body = {"prompt": PROMPT, "max_tokens": 7, "n": 2, "ignore_eos": True}
    usage = server.post("/v1/completions", body)[1]["usage"]
    after = counts(server)
    grown = {name: after[name] - before[name] for name in COUNTED}
    assert grown == {
        "vllm:prompt_tokens_total": 2 * usage["prompt_tokens"],
        "vllm:generation_tokens_total": 14,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_count": 12,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_success_total": 2,
        "vllm:request_queue_time_seconds_count": 2,
        "vllm:request_prefill_time_seconds_count": 2,
        "vllm:request_decode_time_seconds_count": 2,
        "vllm:request_inference_time_seconds_count": 2,
        "vllm:request_time_per_output_token_seconds_count": 2,
        "vllm:request_prefill_kv_computed_tokens_count": 2,
        "vllm:request_params_max_tokens_count": 2,
        "vllm:request_params_n_sum": 2,
    }
    assert usage["completion_tokens"] == 14


def test_steps_are_counted_without_graphs_too(server: LiveServer) -> None:
    """A CPU captures nothing: every step is of mode NONE."""
    server.await_idle()
    names = ("sidestream:steps_total", "vllm:iteration_tokens_total_count", "vllm:iteration_tokens_total_sum")
    steps, counted, tokens = (server.metric(name) for name in names)
    assert steps == counted == server.metric("sidestream:steps_total", mode="NONE") > 0
    usage = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 7, "ignore_eos": True})[1]["usage"]
    server.await_idle()
    more, counted_more, ran = (server.metric(name) for name in names)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert more - steps == counted_more - counted == 7
    assert ran - tokens == usage["prompt_tokens"] - cached + 6, "the last token is never run"


def test_the_parts_of_a_request_s_time_add_up(server: LiveServer) -> None:
    """A request that queues for a seat, since others hold all: its parts are those of its whole time."""
    server.await_idle()
    whole = "vllm:e2e_request_latency_seconds_sum"
    before = {name: server.metric(name) for name in (whole, *map(SECONDS.format, PARTS))}
    body = {"prompt": [PROMPT] * 40, "max_tokens": 5, "ignore_eos": True}
    assert server.post("/v1/completions", body)[0] == 200
    grown = {name: server.metric(name) - value for name, value in before.items()}
    queue, prefill, decode, inference = (grown[SECONDS.format(part)] for part in PARTS)
    assert queue > 0, "16 seats for 40 prompts"
    assert inference == pytest.approx(prefill + decode)
    assert grown[whole] == pytest.approx(queue + inference, rel=1e-2)


def test_what_was_compiled_in_service_is_counted() -> None:
    assert _of_state(EngineState(late_compilations=3))["sidestream:late_compilations"].samples[0].value == 3


def test_step_sizes_are_a_histogram() -> None:
    state = EngineState(step_sizes={1: 5, 16: 2, 65536: 1}, num_tokens=40_000)
    samples = _of_state(state)["vllm:iteration_tokens_total"].samples
    buckets = {sample.labels["le"]: sample.value for sample in samples if sample.name.endswith("_bucket")}
    assert [buckets[size] for size in ("1.0", "8.0", "16.0", "32768.0", "+Inf")] == [5, 5, 7, 7, 8]
    assert {s.name: s.value for s in samples if "_bucket" not in s.name} == {
        "vllm:iteration_tokens_total_count": 8,
        "vllm:iteration_tokens_total_sum": 40_000,
    }


def test_a_server_whose_engine_is_starting_has_metrics() -> None:
    families = {family.name for family in text_string_to_metric_families(Metrics("m").text().decode())}
    assert "vllm:time_to_first_token_seconds" in families
    assert "vllm:num_requests_running" not in families


def test_refusals_are_counted_by_status(server: LiveServer) -> None:
    """Wherever they are refused: by a field's range or type, before a body is read, or for want of a path."""
    statuses = ("400", "404", "413")
    before = [server.metric("sidestream:requests_refused_total", status=status) for status in statuses]
    server.post("/v1/completions", {"prompt": PROMPT, "top_p": 2})
    server.post("/v1/completions", {"prompt": PROMPT, "top_p": "x"})
    server.post("/tokenize", b"{")
    server.post("/v1/embeddings", {})
    server.post("/v1/completions", b" " * 1_000_001)
    after = [server.metric("sidestream:requests_refused_total", status=status) for status in statuses]
    assert [now - then for now, then in zip(after, before, strict=True)] == [3, 1, 1]


def test_what_the_engine_refuses_is_no_completion(server: LiveServer) -> None:
    server.await_idle()
    before = counts(server)
    status, _ = server.post("/v1/completions", {"prompt": PROMPT, "structured_outputs": {"regex": "[0-9{3"}})
    assert status == 400
    assert counts(server) == before


def test_the_ledger_adds_up(server: LiveServer) -> None:
    _, ledger = server.get("/ledger")
    parts = ledger["bytes"]["parts"]
    assert sum(part["measured"] for part in parts.values()) == ledger["bytes"]["measured"] <= ledger["bytes"]["budget"]
    assert sum(server.metric("sidestream:memory_bytes", part=name) for name in parts) == ledger["bytes"]["measured"]
