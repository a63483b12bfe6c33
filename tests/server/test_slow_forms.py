"""Forms that take long, over HTTP: refused at the limit, ended with their client, and in nobody's way."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.engine.test_form_trials import ENDLESS, until
from tests.server.live_server import LiveServer, live_server
from tests.server.test_disconnect import Client

PROMPT = "Question: What is 12 + 30?\nAnswer:"


def asking(form: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 30, "structured_outputs": form}


def endless(number: int) -> dict[str, Any]:
    return asking({"grammar": f'root ::= "{number}" {ENDLESS}'})


def quick(number: int) -> dict[str, Any]:
    return asking({"regex": f"[a-c]{{4}}{number}"})


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server("--max-num-seqs", "2", "--max-form-seconds", "1800") as made:
        yield made.await_ready()


def processes(server: LiveServer) -> list[psutil.Process]:
    """Those that the engine's process has started: one that tries forms, and its children."""
    return list(psutil.Process(server.engine_pid).children(recursive=True))


def test_a_server_says_what_took_too_long() -> None:
    with live_server("--max-num-seqs", "2", "--max-form-seconds", "3") as server:
        server.await_ready()
        status, answer = server.post("/v1/completions", endless(0))
        assert status == 400
        error = answer["error"]
        said = "structured_outputs grammar was not compiled and tried within 3 seconds, the limit (max_form_seconds)"
        assert (error["message"], error["param"]) == (said, "structured_outputs")
        assert server.post("/v1/completions", quick(0))[0] == 200


def test_others_are_served_while_slow_forms_are_tried_and_a_client_that_goes_ends_its_trial(
    server: LiveServer,
) -> None:
    assert not processes(server), "none was needed so far"
    clients = [Client(server, endless(i)) for i in range(5)]
    until(lambda: len(processes(server)) > 1)
    for i in range(2):
        status, answer = server.post("/v1/completions", quick(i))
        assert status == 200
        assert re.fullmatch(f"[a-c]{{4}}{i}", answer["choices"][0]["text"])
    for client in clients:
        client.cut()
    until(lambda: len(processes(server)) == 1)
    assert server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2})[0] == 200


def test_a_killed_process_costs_no_request(server: LiveServer) -> None:
    assert server.post("/v1/completions", quick(2))[0] == 200
    (process,) = processes(server)
    client = Client(server, endless(5))
    until(lambda: len(processes(server)) == 2)
    answers: list[int] = []
    process.kill()
    waiter = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", quick(3))[0]))
    waiter.start()
    waiter.join()
    assert answers == [200]
    until(lambda: len(processes(server)) == 2)  # the slow form is tried anew
    assert process not in processes(server)
    client.cut()
    until(lambda: len(processes(server)) == 1)


def test_nothing_outlives_a_killed_engine(server: LiveServer) -> None:
    """The last of this server."""
    client = Client(server, endless(6))
    until(lambda: len(processes(server)) == 2)
    left = processes(server)
    os.kill(server.engine_pid, signal.SIGKILL)
    assert server.exit_code() == 2
    until(lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in left))
    client.cut()
