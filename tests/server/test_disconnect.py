"""A client that goes away takes its requests with it, at any stage."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.live_server import LiveServer, live_server

PROMPT = "Question: What is 12 + 30?\nAnswer:"
LONG = {"max_tokens": 30000, "ignore_eos": True, "temperature": 0}
"""Minutes of work on a CPU, if nobody stops it."""


@pytest.fixture(scope="module")
def narrow() -> Iterator[LiveServer]:
    """Two seats, small steps: so that others queue, and prompts take many steps."""
    with live_server("--max-num-seqs", "2", "--max-num-batched-tokens", "64") as running:
        yield running.await_ready()


class Client:
    """A bare connection that sends one request and can be cut."""

    def __init__(self, server: LiveServer, body: dict[str, Any]) -> None:
        import json

        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=300)
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        self.socket.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)

    def read_some(self) -> bytes:
        return self.socket.recv(65536)

    def cut(self) -> None:
        self.socket.close()


def await_count(server: LiveServer, name: str, count: float) -> None:
    deadline = time.monotonic() + 90
    while server.metric(name) != count:
        assert time.monotonic() < deadline, f"{name} is {server.metric(name)}, not {count}"
        time.sleep(0.02)


def test_mid_stream(narrow: LiveServer) -> None:
    gone = narrow.metric("sidestream:requests_disconnected_total")
    client = Client(narrow, {"prompt": PROMPT, "stream": True, **LONG})
    assert b"200 OK" in client.read_some()
    client.cut()
    narrow.await_idle()
    assert narrow.metric("sidestream:requests_disconnected_total") == gone + 1


def test_whole_answer(narrow: LiveServer) -> None:
    gone = narrow.metric("sidestream:requests_disconnected_total")
    client = Client(narrow, {"prompt": PROMPT, **LONG})
    await_count(narrow, "vllm:num_requests_running", 1)
    client.cut()
    narrow.await_idle()
    assert narrow.metric("sidestream:requests_disconnected_total") == gone + 1


@pytest.mark.parametrize("stream", [True, False])
def test_in_the_queue(narrow: LiveServer, stream: bool) -> None:
    holders = [Client(narrow, {"prompt": PROMPT, **LONG}) for _ in range(2)]
    await_count(narrow, "vllm:num_requests_running", 2)
    queued = Client(narrow, {"prompt": PROMPT, "stream": stream, **LONG})
    await_count(narrow, "vllm:num_requests_waiting", 1)
    queued.cut()
    await_count(narrow, "vllm:num_requests_waiting", 0)
    assert narrow.metric("vllm:num_requests_running") == 2, "the others are not touched"
    for holder in holders:
        holder.cut()
    narrow.await_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_in_a_chunked_prefill(narrow: LiveServer, stream: bool) -> None:
    client = Client(narrow, {"prompt": [7] * 30000, "stream": stream, **LONG})
    await_count(narrow, "vllm:num_requests_running", 1)
    before = narrow.metric("vllm:prompt_tokens_total")
    client.cut()
    narrow.await_idle()
    assert narrow.metric("vllm:prompt_tokens_total") == before, "the prompt was not finished"


def test_several_completions(narrow: LiveServer) -> None:
    client = Client(narrow, {"prompt": [PROMPT, PROMPT], "n": 3, "stream": True, **LONG})
    assert b"200 OK" in client.read_some()
    client.cut()
    narrow.await_idle()
    aborted = narrow.metric("vllm:request_success_total", finished_reason="abort")
    assert aborted >= 6


def test_a_client_that_stays_is_served_after_them(narrow: LiveServer) -> None:
    status, answer = narrow.post("/v1/completions", {"prompt": PROMPT, "temperature": 0, "max_tokens": 30})
    assert (status, answer["choices"][0]["text"]) == (200, " 12 + 30 = 42\n#### 42")
