"""``/metrics`` as Prometheus reads it, against what was asked of the server."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from sidestream.engine.wire import EngineState
from sidestream.server.metrics import Metrics
from tests.server.live_server import LiveServer

PROMPT = "Question: What is 12 + 30?\nAnswer:"
COUNTED = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_success_total",
)


def counts(server: LiveServer) -> dict[str, float]:
    return {name: server.metric(name) for name in COUNTED}


def test_the_page_parses_and_every_sample_names_the_model(server: LiveServer) -> None:
    _, text = server.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert families[name].type == "gauge"
    for family in families.values():
        assert family.documentation
        assert all(sample.labels["model_name"] == "glm5-next-tiny" for sample in family.samples)


def test_a_host_pool_is_reported_where_there_is_one(server: LiveServer) -> None:
    assert "hisparse" not in server.get("/metrics")[1]
    ready = SimpleNamespace(num_blocks=9, ledger={"parts": {}})
    state = EngineState(hisparse={"spilled_blocks": 3, "spilled_bytes": 4096, "missed_rows": 7, "free_host_blocks": 5})
    metrics = Metrics("m")
    metrics.follow(lambda: (ready, state))  # type: ignore[arg-type, return-value]
    families = {f.name: f for f in text_string_to_metric_families(metrics.text().decode())}
    assert families["sidestream:hisparse_spilled_bytes"].type == "counter"
    assert families["sidestream:hisparse_spilled_bytes"].samples[0].value == 4096
    assert families["sidestream:hisparse_free_host_blocks"].type == "gauge"


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
    }
    assert usage["completion_tokens"] == 14


def test_refusals_are_counted_by_status(server: LiveServer) -> None:
    before = server.metric("sidestream:requests_refused_total", status="400")
    server.post("/v1/completions", {"prompt": PROMPT, "top_p": 2})
    assert server.metric("sidestream:requests_refused_total", status="400") == before + 1


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
