"""``sidestream serve`` as its user sees it: phases that add up, errors before anything listens, what a signal says."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from sidestream.cli.serve_report import ServeReport
from sidestream.engine.bundled import bundled_model
from sidestream.engine.startup_clock import StartupClock
from tests.server.live_server import LiveServer, live_server

PHASE = re.compile(r"(?m)^([a-z' -]+): ([0-9.]+) s$")
NAMED = ["server imports", "engine process", "engine imports", "config", "weights", "caches", "engine's tokenizer"]


def failing_start(*options: str) -> list[str]:
    """Lines on stderr of a server that must end by itself with exit code 2."""
    command = [sys.executable, "-m", "sidestream.cli.main", "serve", "--port", "0", "--device", "cpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundled_model(), tmp_path / "model"))


def test_settings_are_checked_before_anything_listens(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    for options, says in (
        (("--memory-limit", "1MiB"), "CapacityError: the weights take"),
        ((str(copy),), "CheckpointError: "),
    ):
        lines = failing_start(*options)
        assert lines[-1].startswith(says)
        assert not any("listening" in line for line in lines)


def test_what_needs_no_engine_is_checked_without_one(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, says in (
            (("--port", port, "--max-num-seqs", "0"), "ConfigError: max_num_seqs must be a positive integer, got 0"),
            (("--port", port, "--memory-limit", "9PB"), "ConfigError: memory_limit is '9PB'; give bytes"),
            (("--port", port, "--memory-limit", "9TB"), "ConfigError: memory_limit is '9TB', which is 9000000000000 "),
            (("--port", port, "--drain-seconds", "-1"), "ConfigError: drain_seconds is -1, at least 0 is needed"),
            (("--port", port, str(copy)), f"ConfigError: {copy}/config.json: is not JSON"),
            (
                ("--port", port),
                f"ConfigError: cannot listen on 127.0.0.1 port {port}: Address already in use; give another",
            ),
            (("--host", "no such host"), "ConfigError: cannot listen on no such host port 0: "),
            ((str(copy / "missing"),), "CheckpointError: model "),
            ((str(copy),), f"ConfigError: {copy}/config.json: is not JSON"),
            (("--drain-seconds", "-1"), "ConfigError: drain_seconds is -1, at least 0 is needed"),
            (("--no-such-option",), "Error: No such option: --no-such-option"),
            (("--max-num-seqs", "many"), "Error: Invalid value for '--max-num-seqs': "),
        ):
            lines = failing_start(*options)
            assert lines[-1].startswith(says)
            assert not any("engine process" in line for line in lines)


def test_what_fails_later_is_the_last_line_too(copy: Path) -> None:
    """A tensor that a layer asks for and no file holds: found while weights are loaded, when the port is open."""
    path = copy / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header["spare"] = header.pop("model.language_model.norm.weight")
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + size :])
    lines = failing_start(str(copy))
    assert any("listening on" in line for line in lines)
    assert lines[-1].startswith("CheckpointError: ")
    assert "1 tensors are missing: model.norm.weight" in lines[-1]


@contextmanager
def streaming(server: LiveServer, tokens: int) -> Iterator[list[str]]:
    """A stream that has begun; its lines."""
    lines: list[str] = []
    begun = threading.Event()
    body = {"prompt": "Question: What is 1 + 2?\nAnswer:", "max_tokens": tokens, "ignore_eos": True, "stream": True}

    def read() -> None:
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=300) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(120)
    yield lines
    reader.join()


def test_phases_add_up_and_an_end_is_announced() -> None:
    with live_server("--drain-seconds", "100") as server:
        server.await_ready()
        text = "".join(server.lines)
        phases = PHASE.findall(text)
        names = [name for name, _ in phases]
        assert names in ([*NAMED, "warm-up"], [*NAMED, "warm-up", "server's tokenizer"])
        ready = re.search(r"ready after ([0-9.]+) s", text)
        assert ready is not None
        rounding = 0.005 * (len(phases) + 1) + 1e-9
        assert abs(sum(float(seconds) for _, seconds in phases) - float(ready[1])) <= rounding
        with streaming(server, 100) as lines:
            server.send_signal(signal.SIGTERM)
        assert "data: [DONE]" in lines
        assert server.exit_code() == 0
    said = "".join(server.lines).splitlines()
    assert "SIGTERM: accepting no more; 1 request may finish, for at most 100 s (--drain-seconds)" in said
    assert re.fullmatch(r"stopped after [0-9.]+ s", said[-1])


def test_a_start_that_is_ended_says_so() -> None:
    with live_server() as server:
        server.send_signal(signal.SIGINT)
        assert server.exit_code() == 0
    said = "".join(server.lines).splitlines()
    assert said[-2] == "SIGINT: accepting no more; no request is running"
    assert said[-1].startswith("stopped after ")


def test_the_servers_process_imports_no_torch_before_it_starts_the_engines() -> None:
    code = "import sys, sidestream.cli.main, sidestream.server.run\n"
    code += "print({'torch', 'fastapi', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report_on(file: io.StringIO) -> str:
    """What a start of 12.5 s and an end look like."""
    now = 50.0
    with ServeReport("tiny", file=file) as report:
        clock = StartupClock("server imports", origin=40.0, now=lambda: now, tell=report.phase)
        clock.begin("engine process")
        now += 0.25
        clock.begin("weights", total=3 * 2**20)
        report.listening("http://here:1")
        now += 1
        clock.advance(3 * 2**20)
        captured = clock.counting("graphs", 12)
        for _ in range(12):
            now += 0.1
            captured(None)
        clock.begin("warm-up")
        now += 0.05
        report.ready(clock.end())
        report.stopping("SIGTERM", requests=2, limit=None)
        report.stopped(3.21, unfinished=0)
        report.stopped(30, unfinished=1)
    return file.getvalue()


def test_a_report_has_a_line_a_phase() -> None:
    assert report_on(io.StringIO()).splitlines() == [
        "server imports: 10.00 s",
        "engine process: 0.25 s",
        "tiny: listening on http://here:1, starting the engine",
        "weights: 1.00 s",
        "graphs: 1.20 s",
        "warm-up: 0.05 s",
        "ready after 12.50 s: http://here:1/v1, http://here:1/dashboard",
        "SIGTERM: accepting no more; 2 requests may finish, without a limit (--drain-seconds)",
        "stopped after 3.2 s",
        "stopped after 30.0 s; 1 request cut off by --drain-seconds",
    ]


def test_a_terminal_sees_bars_with_parts() -> None:
    shown = report_on(Terminal())
    for text in ("12 of 12", "3 of 3 MiB", "10.00 s", "0.25 s", "1.20 s", "ready after 12.50 s", "━"):
        assert text in shown


class Gone(io.StringIO):
    """A log whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_server_whose_log_nobody_reads_goes_on() -> None:
    assert report_on(Gone()) == ""


def test_lines_of_requests_cannot_move_the_cursor() -> None:
    file = io.StringIO()
    with ServeReport("tiny", file=file) as report:
        report.refused(404, "/a\nb", "\x1b[31mno")
        report.answered("GET /\u202e 200")
    assert file.getvalue() == "404 /a\\nb: \\x1b[31mno\nGET /\\u202e 200\n"
