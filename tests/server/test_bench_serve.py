"""``sidestream bench serve`` against live servers: what it reports is what the server did."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from sidestream.cli.main import app
from sidestream.engine.llm import bundled_model
from sidestream.errors import ConfigError, SidestreamError
from tests.server.live_server import LiveServer

SMALL = ("--num-prompts", "6", "--input-len", "60", "--output-len", "9", "--num-warmups", "0")
TOKENIZER = ("--tokenizer", str(bundled_model()))
COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total")


def run(*options: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["bench", "serve", *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


def measured(folder: Path, *options: str, code: int = 0) -> dict[str, Any]:
    text = run("--json", str(folder / "out.json"), *options, code=code)
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert f"{found['requests']} answered, {found['failed']} failed" in text
    return found


def test_counts_are_the_servers_own(server: LiveServer, tmp_path: Path) -> None:
    before = [server.metric(name) for name in COUNTERS]
    found = measured(
        tmp_path, "--url", server.url, *SMALL, *TOKENIZER, "--max-concurrency", "3", "--goodput", "e2e:1e7"
    )
    after = [server.metric(name) for name in COUNTERS]
    prompt, completion, requests = (b - a for a, b in zip(before, after, strict=True))
    assert (found["requests"], found["failed"]) == (6, 0) == (requests, 0)
    assert found["completion_tokens"] == 54 == completion
    assert found["prompt_tokens"] == prompt
    assert 6 * 57 <= prompt <= 6 * 60
    assert found["requests_without_usage"] == 0
    assert found["max_in_flight"] <= 3
    assert found["goodput"]["requests"] == 6
    assert (found["model"], found["owned_by"]) == ("glm5-next-tiny", "sidestream")
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert 0 < found[name]["min"] <= found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"]
    assert found["ttft_ms"]["max"] < found["e2e_ms"]["max"]


def test_chats_without_a_tokenizer(server: LiveServer, tmp_path: Path) -> None:
    """The template's tokens count: what the server sees is what was asked."""
    options = ("--endpoint", "/v1/chat/completions", "--dataset", "synthetic", "--request-rate", "50")
    found = measured(tmp_path, "--url", f"{server.url}/v1", *SMALL, *options)
    assert (found["requests"], found["failed"], found["completion_tokens"]) == (6, 0, 54)
    assert found["prompt_tokens"] == 6 * 60
    assert found["workload"]["request_rate"] == 50
    assert found["endpoint"] == "/v1/chat/completions"


def test_random_ids_are_sent_as_they_are(server: LiveServer, tmp_path: Path) -> None:
    options = ("--dataset", "random-ids", "--vocab-size", "1500", "--range-ratio", "0.3", "--continuous-usage")
    found = measured(tmp_path, "--url", server.url, *SMALL, *options)
    again = measured(tmp_path, "--url", server.url, *SMALL, *options)
    for report in (found, again):
        assert (report["requests"], report["failed"]) == (6, 0)
        assert 6 * 42 <= report["prompt_tokens"] <= 6 * 78
    assert found["prompt_tokens"] == again["prompt_tokens"], "the same seed, the same work"
    assert found["completion_tokens"] == again["completion_tokens"]
    # every token is an arrival if the server counts each, unless several came together
    assert found["itl_ms"]["count"] <= found["completion_tokens"] - 6


def test_what_the_server_refuses_is_counted(server: LiveServer, tmp_path: Path) -> None:
    wrong = ("--url", server.url, *TOKENIZER, *SMALL, "--extra-body", '{"top_p": 7}')
    found = measured(tmp_path, *wrong, code=1)
    assert (found["requests"], found["failed"]) == (0, 6)
    (kind,) = found["failures"]
    assert kind == "http 400"
    assert "top_p" in found["failures"][kind]["message"]
    with pytest.raises(SidestreamError, match="no request of the warm-up was answered: http 400"):
        run(*wrong, "--num-warmups", "2")
    with pytest.raises(SidestreamError, match="http 404"):
        run("--url", server.url, "--served-model-name", "other", *TOKENIZER)


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_the_server_is_asked_how_long_prompts_are(server: LiveServer, endpoint: str) -> None:
    text = run("--url", server.url, "--model", "glm5-next-tiny", "--endpoint", endpoint, *SMALL)
    assert "6 prose prompts of 60 tokens, answers of 9" in text
    with pytest.raises(SidestreamError, match="http 404"):
        run("--url", server.url, "--model", "no-such", "--endpoint", endpoint)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--url", "nowhere"), "url is 'nowhere'; it must be like"),
        (("--url", "http://localhost:1", "--", "--max-num-seqs", "4"), "options behind -- are for one of our own"),
        (("--model", "no/such"), "model is 'no/such': there is no such folder"),
        (("--url", "http://localhost:1", "--tokenizer", "."), "tokenizer is '.', and there is none in that folder"),
        (("--model", str(bundled_model() / "config.json")), "the model has no tokenizer; use --dataset random-ids"),
        (("--url", "http://localhost:1", "--dataset", "random-ids"), "needs --vocab-size, or --tokenizer"),
        (("--dataset", "random-ids", "--endpoint", "/v1/chat/completions"), "takes no token ids"),
        (("--endpoint", "/v1/responses"), "endpoint is '/v1/responses', allowed are"),
        (("--extra-body", "[1]"), "must be a JSON object"),
        (("--extra-body", "{"), "extra_body is '{'"),
        (("--goodput", "latency:5"), "goodput is 'latency:5'; it must be like ttft:200"),
        (("--request-rate", "0"), "request_rate is 0.0, more than 0"),
        (("--max-concurrency", "0"), "max_concurrency is 0, at least 1"),
        (("--num-prompts", "0"), "num_prompts is 0, at least 1"),
        (("--json", "no/such/a.json"), "cannot write the report no/such/a.json"),
    ],
)
def test_mistakes_are_named_before_anything_starts(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*options)


def test_a_server_of_our_own_that_cannot_start() -> None:
    with pytest.raises(SidestreamError, match=r"ended with 2 before it was ready:\n(.|\n)*no such device"):
        run("--", "--device", "no such device")


def test_a_server_of_our_own(tmp_path: Path) -> None:
    """A config alone: dummy weights, no text, and every token's arrival seen all the same. The server is gone after."""
    config = tmp_path / "tiny-config.json"
    config.write_bytes((bundled_model() / "config.json").read_bytes())
    before = {child.pid for child in psutil.Process().children()}
    options = ("--model", str(config), "--dataset", "random-ids", *SMALL)
    found = measured(tmp_path, *options, "--", "--device", "cpu", "--max-num-seqs", "4", "--memory-limit", "1GiB")
    assert (found["requests"], found["failed"]) == (6, 0)
    assert (found["prompt_tokens"], found["completion_tokens"]) == (360, 54)
    assert found["model"] == "tiny-config"
    assert found["itl_ms"]["count"] > 6
    assert {child.pid for child in psutil.Process().children()} <= before


HELD = """
import os, signal
from sidestream.engine.bench.load.child_server import child_server

with child_server(["--device", "cpu"], on_line=lambda line: None):
    print("ready", flush=True)
    signal.pause()
"""


def test_a_server_of_our_own_ends_with_sigterm() -> None:
    with subprocess.Popen([sys.executable, "-c", HELD], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2, "the server, and its engine"
        process.send_signal(signal.SIGTERM)
        assert process.wait(180) == 128 + signal.SIGTERM
    assert not [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
