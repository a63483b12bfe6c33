"""Connections that misbehave: heads without end, clients that do not read, methods that are not served."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest

from sidestream.engine.async_engine import Delta
from sidestream.engine.input_processor import ProcessedPrompt
from tests.server.in_process import StandIn, make, served

SECONDS = 60.0
PIECE = "x" * 100_000


@pytest.fixture(scope="module")
def stand_in() -> Iterator[tuple[str, StandIn]]:
    app, _, engine = make()
    with served(app) as address:
        yield address, engine


def connect(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=SECONDS)


def read_answer(client: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one answer."""
    file = client.makefile("rb")
    status = int(file.readline().split()[1])
    headers = dict(line.decode().lower().split(": ", 1) for line in iter(file.readline, b"\r\n"))
    return status, headers, file.read(int(headers["content-length"]))


class Endless:
    """An answer that goes on as long as it is read."""

    def __init__(self, engine: StandIn) -> None:
        self.made = 0
        self._engine = engine
        engine.script = self._answer

    async def _answer(self, batch: Sequence[ProcessedPrompt]) -> AsyncGenerator[list[Delta], None]:
        while True:
            self.made += 1
            yield [self._engine.delta(batch[0], PIECE)]
            await asyncio.sleep(0)

    def ask(self, client: socket.socket) -> None:
        body = json.dumps({"prompt": "a", "stream": True}).encode()
        start = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        client.sendall(start + f"content-length: {len(body)}\r\n\r\n".encode() + body)

    def await_standstill(self) -> int:
        """Return once no more is made, with how much was."""
        before = -1
        deadline = time.monotonic() + SECONDS
        while self.made != before or not self.made:
            assert time.monotonic() < deadline, f"{self.made} pieces were made, and nobody reads them"
            before = self.made
            time.sleep(0.5)
        return self.made


def head(size: int) -> bytes:
    """A request for ``/health`` with a head of so many bytes."""
    start = b"GET /health HTTP/1.1\r\nhost: x\r\nx-filler: "
    return start + b"a" * (size - len(start) - 4) + b"\r\n\r\n"


def test_a_head_without_end_is_refused_and_its_sender_hung_up_on(stand_in: tuple[str, StandIn]) -> None:
    with connect(stand_in[0]) as client:
        client.sendall(head(60_000))
        assert read_answer(client)[0] == 200
        client.sendall(head(60_000))
        assert read_answer(client)[0] == 200, "the next head is counted from its own beginning"
        client.sendall(head(200_000)[:150_000])
        status, headers, body = read_answer(client)
        assert (status, headers["connection"].strip()) == (431, "close")
        assert json.loads(body)["error"]["code"] == "headers_too_large"
        assert "65536 bytes" in json.loads(body)["error"]["message"]
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""


@pytest.mark.parametrize("request_head", [head(66_000), head(300_000), b"GET /" + b"a" * 66_000 + b" HTTP/1.1\r\n\r\n"])
def test_a_large_head_is_refused_whole_too(stand_in: tuple[str, StandIn], request_head: bytes) -> None:
    with connect(stand_in[0]) as client:
        client.sendall(request_head)
        status, _, body = read_answer(client)
        assert (status, json.loads(body)["error"]["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize("said", [b"GARBAGE\r\n\r\n", b"BREW /health HTTP/1.1\r\n\r\n"])
def test_what_is_no_http_is_refused_in_the_form_of_all_errors(stand_in: tuple[str, StandIn], said: bytes) -> None:
    with connect(stand_in[0]) as client:
        client.sendall(said)
        status, _, body = read_answer(client)
        assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_http")


def test_a_large_body_is_no_head(stand_in: tuple[str, StandIn]) -> None:
    body = json.dumps({"prompt": "a" * 300_000}).encode()
    answer = httpx.post(stand_in[0] + "/tokenize", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["count"] > 0) == (200, True)


def test_a_client_that_does_not_read_holds_back_its_own_answer(stand_in: tuple[str, StandIn]) -> None:
    """What waits for it is bounded by buffers of the machine, however much there is to say; others are served."""
    address, engine = stand_in
    endless = Endless(engine)
    with connect(address) as client:
        endless.ask(client)
        assert endless.await_standstill() * len(PIECE) < 64 * 2**20
        assert httpx.get(address + "/health").status_code == 200
    deadline = time.monotonic() + SECONDS
    while engine.open:
        assert time.monotonic() < deadline, "the client is gone, its request is not"
        time.sleep(0.02)


def test_a_client_that_does_not_read_does_not_hold_up_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    """Nor is what it cannot be told any more an error of the server's."""
    app, _, engine = make()
    endless = Endless(engine)
    with ExitStack() as clients, served(app) as address:
        client = clients.enter_context(connect(address))
        endless.ask(client)
        endless.await_standstill()
    said = capfd.readouterr().err
    assert "Cancel 1 running" in said
    assert "Traceback" not in said
    assert engine.open == 0


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize(("path", "allowed"), [("/health", "GET"), ("/v1/completions", "POST")])
def test_other_methods(stand_in: tuple[str, StandIn], method: str, path: str, allowed: str) -> None:
    answer = httpx.request(method, stand_in[0] + path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert method == "HEAD" or answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/nowhere", "/v1/models/%00", "/v1/models/%ff", "/nowhere?" + "a=b&" * 999]
)
def test_a_websocket_is_not_opened(stand_in: tuple[str, StandIn], path: str) -> None:
    key: dict[str, Any] = {"sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==", "sec-websocket-version": "13"}
    answer = httpx.get(stand_in[0] + path, headers={"connection": "upgrade", "upgrade": "websocket", **key})
    assert answer.status_code in (404, 405)
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999999\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}a",
        b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
        b"\x16\x03\x01\x02\x00 no HTTP at all \r\n\r\n",
    ],
)
def test_what_is_no_proper_http_is_400(stand_in: tuple[str, StandIn], request_bytes: bytes) -> None:
    with connect(stand_in[0]) as client:
        client.sendall(request_bytes)
        assert client.makefile("rb").read(12) == b"HTTP/1.1 400"
