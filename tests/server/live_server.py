"""A real ``sidestream serve`` in a process of its own, on a free port of this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

START_SECONDS = 300.0
STOP_SECONDS = 180.0


class LiveServer:
    """The process and what it printed."""

    def __init__(self, options: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sidestream.cli.main", "serve", "--port", "0", "--device", "cpu", *options],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._await_line(r"listening on (http://\S+?),")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self.lines.append("")
            self._news.notify_all()

    def _await_line(self, pattern: str) -> str:
        deadline = time.monotonic() + START_SECONDS
        with self._news:
            while True:
                for line in self.lines:
                    if match := re.search(pattern, line):
                        return match[1]
                assert "" not in self.lines, f"the server ended: {''.join(self.lines)}"
                left = deadline - time.monotonic()
                assert left > 0, f"no line like {pattern!r}: {''.join(self.lines)}"
                self._news.wait(left)

    def await_ready(self) -> LiveServer:
        self._await_line(r"(ready) after")
        return self

    @property
    def engine_pid(self) -> int:
        """Of the engine's process, the only child."""
        children = subprocess.run(
            ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(self.process.pid)],  # wide: a long path cuts no name
            capture_output=True,
            text=True,
            check=True,
        )
        (pid,) = [int(line.split()[0]) for line in children.stdout.splitlines() if "engine_process" in line]
        return pid

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        """Of the process, which must end by itself now."""
        return self.process.wait(STOP_SECONDS)

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        return self._call(urllib.request.Request(self.url + path, headers=headers))

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **headers}
        return self._call(urllib.request.Request(self.url + path, data=data, headers=headers))

    def _call(self, request: urllib.request.Request) -> tuple[int, Any]:
        """Status and body, as JSON if it is that."""
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                status, body = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                status, body = error.code, error.read().decode()
        try:
            return status, json.loads(body, parse_constant=_refuse)
        except ValueError:
            return status, body

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        _, text = self.get("/metrics")
        families = list(text_string_to_metric_families(text))
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def await_idle(self, *, seconds: float = 60.0) -> None:
        """Nothing runs or waits, and every block and slot is free again."""
        deadline = time.monotonic() + seconds
        while True:
            busy = self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting")
            ledger = self.get("/ledger")[1]
            blocks = ledger["blocks"]
            if not busy and blocks["free"] == blocks["total"]:
                return
            assert time.monotonic() < deadline, f"{busy} requests are still there, blocks: {blocks}"
            time.sleep(0.05)


def _refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is not JSON")


@contextmanager
def live_server(*options: str, environment: dict[str, str] | None = None) -> Iterator[LiveServer]:
    """A server that is ended with the block, whatever happened; not necessarily ready yet."""
    server = LiveServer(options, environment)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
            try:
                server.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
        server._reader.join()
        assert server.process.stderr is not None
        server.process.stderr.close()
