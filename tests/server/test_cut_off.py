"""A drain that is over before an answer is: the client is told so, in the form that it expects."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from sidestream.engine.async_engine import Delta
from sidestream.engine.input_processor import ProcessedPrompt
from tests.server.in_process import StandIn, error_of, make, running

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


class Exchange:
    """One request to the application as a server makes it, in a task that is cancelled as a server does."""

    def __init__(self, app: FastAPI, path: str, body: bytes, *, whole: bool = True) -> None:
        self.sent: list[Any] = []
        self.news = asyncio.Event()
        self._pending = [{"type": "http.request", "body": body, "more_body": not whole}]
        headers = [(b"content-type", b"application/json"), (b"origin", b"http://page")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        scope |= {"raw_path": path.encode(), "root_path": "", "scheme": "http", "http_version": "1.1"}
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._pending:
            return self._pending.pop()
        return await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        self.news.set()

    async def cut(self) -> None:
        self.task.cancel()
        await self.task

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def until_open(engine: StandIn) -> None:
    while not engine.open:
        await asyncio.sleep(0)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_of_which_nothing_was_sent_is_503(path: str, stream: bool) -> None:
    app, service, engine = make(cors_origins=("http://page",))

    async def run() -> Exchange:
        exchange = Exchange(app, path, json.dumps(BODIES[path] | {"stream": stream}).encode())
        await until_open(engine)
        await exchange.cut()
        return exchange

    exchange = asyncio.run(run())
    assert exchange.sent[0]["status"] == 503
    error = json.loads(exchange.body)["error"]
    assert (error["type"], error["code"]) == ("service_unavailable", "stopping")
    headers = dict(exchange.sent[0]["headers"])
    assert headers[b"retry-after"] == b"1"
    assert headers[b"access-control-allow-origin"] == b"http://page", "a page may read it too"
    assert engine.open == 0, "what it asked for was aborted"
    assert b'sidestream:requests_refused_total{model_name="glm5-next-tiny",status="503"} 1.0' in service.metrics.text()


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_ends_with_an_error_event(path: str) -> None:
    app, _, engine = make()

    async def one(batch: Sequence[ProcessedPrompt]) -> AsyncGenerator[list[Delta], None]:
        yield [engine.delta(batch[0], "first")]
        await asyncio.Event().wait()

    engine.script = one

    async def run() -> Exchange:
        exchange = Exchange(app, path, json.dumps(BODIES[path] | {"stream": True}).encode())
        while b"first" not in exchange.body:
            exchange.news.clear()
            await exchange.news.wait()
        await exchange.cut()
        return exchange

    exchange = asyncio.run(run())
    assert exchange.sent[0]["status"] == 200
    *events, last, rest = exchange.body.split(b"\n\n")
    assert (rest, exchange.sent[-1].get("more_body", False)) == (b"", False)
    assert b"first" in b"".join(events)
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "stopping"
    assert b"[DONE]" not in exchange.body
    assert engine.open == 0


def test_a_body_that_is_still_being_sent() -> None:
    app, _, _ = make()

    async def run() -> Exchange:
        exchange = Exchange(app, "/v1/completions", b'{"prompt":', whole=False)
        for _ in range(20):
            await asyncio.sleep(0)
        await exchange.cut()
        return exchange

    exchange = asyncio.run(run())
    assert exchange.sent[0]["status"] == 503
    assert json.loads(exchange.body)["error"]["code"] == "stopping"


def test_an_end_at_once_is_told_too() -> None:
    """The drain has no limit, and somebody would not wait for it."""
    app, _, engine = make()
    answers: list[httpx.Response] = []

    def ask(address: str) -> None:
        answers.append(httpx.post(address + "/v1/completions", json={"prompt": "a"}, timeout=60))

    with running(app, drain_seconds=None) as (address, server):
        client = threading.Thread(target=ask, args=(address,))
        client.start()
        while not engine.open:
            assert client.is_alive()
            time.sleep(0.01)
        server.stop()
        server.stop(at_once=True)
        client.join()
    error = error_of(answers[0], 503)
    assert error["code"] == "stopping"
    assert engine.open == 0
