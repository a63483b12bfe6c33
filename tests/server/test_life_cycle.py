"""A server's life: starting, ready, draining, and what becomes of clients when the engine dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import httpx

from tests.server.live_server import LiveServer, live_server

PROMPT = "Question: What is 12 + 30?\nAnswer:"


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "Z"


def await_gone(pid: int) -> None:
    deadline = time.monotonic() + 90
    while not gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def stream_into(server: LiveServer, lines: list[str], started: threading.Event, tokens: int) -> None:
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=300) as answer:
        for line in answer.iter_lines():
            if line:
                lines.append(line)
                started.set()


def test_ready_only_after_a_request_of_its_own_and_drained_at_the_end() -> None:
    with live_server() as server:
        assert server.get("/health")[0] == 200
        status, answer = server.get("/ready")
        assert (status, answer["error"]["code"]) == (503, "starting")
        status, answer = server.post("/v1/completions", {"prompt": PROMPT})
        assert (status, answer["error"]["type"]) == (503, "service_unavailable")
        server.await_ready()
        assert any(line.startswith("warm-up:") for line in server.lines)
        assert server.get("/ready")[0] == 200
        engine = server.engine_pid
        lines: list[str] = []
        started = threading.Event()
        reader = threading.Thread(target=stream_into, args=(server, lines, started, 300))
        reader.start()
        assert started.wait(120)
        server.send_signal(signal.SIGTERM)
        reader.join()
        assert lines[-1] == "data: [DONE]", "the stream went on to its end"
        assert len(lines) > 200
        assert server.exit_code() == 0
        assert gone(engine)


def test_a_limited_drain_says_so_to_those_it_ends() -> None:
    with live_server("--drain-seconds", "1") as server:
        server.await_ready()
        lines: list[str] = []
        started = threading.Event()
        reader = threading.Thread(target=stream_into, args=(server, lines, started, 30000))
        reader.start()
        whole: list[tuple[int, object]] = []
        body = {"prompt": PROMPT, "max_tokens": 30000, "ignore_eos": True}
        waiter = threading.Thread(target=lambda: whole.append(server.post("/v1/completions", body)))
        waiter.start()
        assert started.wait(120)
        while server.metric("vllm:num_requests_running") < 2:
            time.sleep(0.02)
        server.send_signal(signal.SIGTERM)
        reader.join()
        waiter.join()
        assert server.exit_code() == 0
        assert '"stopping"' in lines[-1], "a stream ends with an error, not with [DONE]"
        ((status, answer),) = whole
        assert status == 503
        assert answer["error"]["code"] == "stopping"  # type: ignore[index]
    assert server.lines[-2].endswith("; 2 requests cut off by --drain-seconds\n")


def test_a_killed_engine_is_503_and_a_failed_exit() -> None:
    with live_server() as server:
        server.await_ready()
        lines: list[str] = []
        started = threading.Event()
        reader = threading.Thread(target=stream_into, args=(server, lines, started, 30000))
        reader.start()
        whole: list[tuple[int, object]] = []
        body = {"prompt": PROMPT, "max_tokens": 30000, "ignore_eos": True}
        waiter = threading.Thread(target=lambda: whole.append(server.post("/v1/completions", body)))
        waiter.start()
        assert started.wait(120)
        while server.metric("vllm:num_requests_running") < 2:
            time.sleep(0.02)
        os.kill(server.engine_pid, signal.SIGKILL)
        waiter.join()
        reader.join()
        ((status, answer),) = whole
        assert status == 503
        assert answer["error"]["code"] == "engine_dead"  # type: ignore[index]
        assert '"engine_dead"' in lines[-1], "a stream ends with an error, not with [DONE]"
        assert server.exit_code() == 2
        assert "exit code -9" in "".join(server.lines)


def test_an_engine_without_its_server_ends_and_leaves_no_socket(tmp_path: Path) -> None:
    with live_server(environment={"TMPDIR": str(tmp_path)}) as server:
        server.await_ready()
        engine = server.engine_pid
        server.process.kill()
        await_gone(engine)
    assert not list(tmp_path.glob("sidestream-*"))


def test_a_start_can_be_ended() -> None:
    with live_server() as server:
        deadline = time.monotonic() + 240
        while server.get("/ready")[1]["error"]["message"] == "the engine is starting":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        engine = server.engine_pid
        server.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert gone(engine)


def test_the_key_is_asked_for() -> None:
    with live_server(environment={"SIDESTREAM_API_KEY": "secret"}) as server:
        server.await_ready()
        body = {"prompt": PROMPT, "max_tokens": 2}
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "secret"},
            {"authorization": "Basic secret"},
        ):
            status, answer = server.post("/v1/completions", body, **headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        for scheme in ("Bearer", "bearer", "BEARER "):
            assert server.post("/v1/completions", body, authorization=f"{scheme} secret")[0] == 200
        assert server.get("/v1/models")[0] == 401
        for path in ("/health", "/ready", "/metrics"):
            assert server.get(path)[0] == 200
