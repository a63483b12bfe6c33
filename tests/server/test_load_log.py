"""What a server says while it serves: lines of load, and of requests that it refuses."""

from __future__ import annotations

import io
import logging
import time
from typing import Any

import pytest

from sidestream import __version__
from sidestream.cli.serve_report import ServeReport
from sidestream.engine.bundled import bundled_model
from sidestream.engine.tokenizer import load_tokenizer
from sidestream.engine.wire import EngineState
from sidestream.server.load_log import LoadLog
from tests.server.in_process import call, make
from tests.server.live_server import LiveServer

LONG = {"prompt": "many words " * 20_000}


def test_a_line_a_stretch_while_requests_run_and_one_when_they_end() -> None:
    _, service, engine = make()
    lines: list[str] = []
    log = LoadLog(service, lines.append)

    def pass_by(prompt: int, generated: int, **state: Any) -> list[str]:
        lines.clear()
        service.metrics.prompt_tokens.inc(prompt)
        service.metrics.generation_tokens.inc(generated)
        engine.state = EngineState(**state)
        log.note(10)
        return list(lines)

    assert pass_by(0, 0, free_blocks=4) == []
    assert pass_by(50, 25, free_blocks=1, running=2, waiting=1, prefix_hits=30, prefix_queries=40) == [
        "prompt 5.0 tokens/s, generated 2.5 tokens/s, running 2, waiting 1, KV 75.0%, prefix hits 75.0%"
    ]
    assert pass_by(0, 100, free_blocks=1, running=2, prefix_hits=30, prefix_queries=40) == [
        "prompt 0.0 tokens/s, generated 10.0 tokens/s, running 2, waiting 0, KV 75.0%, prefix hits -"
    ]
    ended = "idle; prompt 0.0 tokens/s, generated {} tokens/s, running 0, waiting 0, KV 0.0%, prefix hits -"
    assert pass_by(0, 0, free_blocks=4, prefix_hits=30, prefix_queries=40) == [ended.format("0.0")]
    assert pass_by(0, 0, free_blocks=4, prefix_hits=30, prefix_queries=40) == []
    assert pass_by(0, 20, free_blocks=4, prefix_hits=30, prefix_queries=40) == [ended.format("2.0")], "came and went"


def test_an_engine_that_is_starting_has_no_load() -> None:
    _, service, _ = make()
    service._engine = None
    LoadLog(service, pytest.fail).note(10)


def test_refused_requests_are_told_with_path_and_reason_but_nothing_they_said() -> None:
    app, service, _ = make()
    told: list[tuple[int, str, str]] = []
    service.on_refused = lambda *refused: told.append(refused)
    assert call(app, "GET", "/health").status_code == 200
    call(app, "POST", "/v1/completions", json={"prompt": "a", "top_p": "xylophone"})
    call(app, "POST", "/v1/completions", json={"prompt": {"xylophone": 1}})
    call(app, "POST", "/v1/completions", content=b'{"prompt": "xylophone')
    call(app, "GET", "/nowhere?key=secret")
    assert [(status, path) for status, path, _ in told] == [*[(400, "/v1/completions")] * 3, (404, "/nowhere")]
    assert [reason for _, _, reason in told[:2]] == ["invalid_type of top_p", "invalid_type of prompt"]
    assert "xylophone" not in str(told)
    service._engine = None
    assert call(app, "GET", "/ready").status_code == 503
    assert len(told) == 4, "probes of a start are not told"


def test_a_refused_request_is_one_line_whatever_it_holds() -> None:
    file = io.StringIO()
    with ServeReport("tiny", file=file) as report:
        report.refused(400, "/a\x1b[2J\nb", "é\r\n200 /forged" + "x" * 10_000)
    (line,) = file.getvalue().splitlines()
    assert line.startswith(r"400 /a\x1b[2J\nb: é\r\n200 /forgedxxx")
    assert len(line) < 600


def test_a_prompt_that_is_too_long_is_refused_without_a_warning_of_the_tokenizer() -> None:
    from transformers.utils import logging as verbosity

    app, _, _ = make()
    before = verbosity.get_verbosity()
    verbosity.set_verbosity_warning()  # whatever other tests of this process left
    heard: list[logging.LogRecord] = []
    handler: Any = logging.Handler()
    handler.emit = heard.append
    logging.getLogger("transformers").addHandler(handler)
    try:
        assert call(app, "POST", "/v1/completions", json=LONG).status_code == 400
        assert heard == []
        fresh: Any = load_tokenizer(bundled_model())  # which no server has taken over
        fresh(LONG["prompt"])
        assert len(heard) == 1, "it would have been heard"
    finally:
        logging.getLogger("transformers").removeHandler(handler)
        verbosity.set_verbosity(before)


def test_version_and_root() -> None:
    app, _, _ = make(api_key="k")
    answer = call(app, "GET", "/version", headers={"authorization": "Bearer k"})
    assert answer.json() == {"version": __version__}
    assert call(app, "GET", "/version").status_code == 401
    root = call(app, "GET", "/")
    assert (root.status_code, root.headers["location"]) == (307, "/dashboard")


def test_a_live_server_says_so_on_stderr(server: LiveServer) -> None:
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 4, "ignore_eos": True})
    server.post("/v1/completions", {"prompt": "a", "top_p": 7})
    deadline = time.monotonic() + 60
    while not any("generated" in line and "KV " in line for line in server.lines):
        assert time.monotonic() < deadline, server.lines
        time.sleep(0.1)
    assert any(line.rstrip() == "400 /v1/completions: invalid_value of top_p" for line in server.lines)
