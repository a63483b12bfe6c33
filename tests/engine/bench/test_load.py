"""The load generator against servers that answer as they should, and against others."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sidestream.engine.bench.load.arrivals import arrival_times
from sidestream.engine.bench.load.generator import LoadRun, generate_load
from sidestream.engine.bench.load.http_client import Address, _certificates, looked_up
from sidestream.engine.bench.load.openai_client import OpenAIClient
from sidestream.engine.bench.load.outcome import FAILURES, Answer, Failure
from sidestream.engine.bench.workload import Job
from sidestream.errors import ConfigError, SidestreamError
from tests.engine.bench.fake_server import (
    CUT,
    GOOD,
    Asked,
    FakeServer,
    Handler,
    event,
    fake_server,
    says,
    says_bytewise,
    stream,
    text_event,
    whole,
)

JOB = Job("How many?", 12)


def load(handler: Handler, jobs: int = 1, **settings: Any) -> tuple[LoadRun, FakeServer]:
    """Some equal requests at once."""

    async def run() -> tuple[LoadRun, FakeServer]:
        async with fake_server(handler) as fake:
            client = OpenAIClient(address=Address.of(fake.url), model="fake")
            return await generate_load(client, [JOB] * jobs, [0.0] * jobs, **settings), fake

    return asyncio.run(run())


def failure(handler: Handler, **settings: Any) -> Failure:
    (outcome,) = load(handler, **settings)[0].outcomes
    assert isinstance(outcome, Failure), outcome
    return outcome


def test_an_answer() -> None:
    run, fake = load(says(GOOD))
    (answer,) = run.answers
    assert answer.counted
    assert (answer.times.prompt_tokens, answer.times.completion_tokens) == (7, 12)
    assert answer.times.sent <= answer.times.arrivals[0] <= answer.times.finished
    (asked,) = fake.asked
    assert (asked.method, asked.path) == ("POST", "/v1/completions")
    assert asked.body == {
        "model": "fake",
        "prompt": "How many?",
        "max_tokens": 12,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_an_answer_byte_by_byte() -> None:
    """Characters of several bytes, lines and sizes of chunks are cut everywhere."""
    (answer,) = load(says_bytewise(GOOD))[0].answers
    assert (answer.times.prompt_tokens, answer.times.completion_tokens) == (7, 12)
    assert len(answer.times.arrivals) == 3


def test_answers_without_chunks() -> None:
    """Of a known length, and up to the end of the connection."""
    body = b"".join(event(content) for content in [text_event("a", reason="stop"), "[DONE]"])
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    for more in (f"content-length: {len(body)}\r\n\r\n".encode(), b"\r\n"):
        (answer,) = load(says(head + more + body))[0].answers
        assert answer.times.completion_tokens == 1


def test_an_interim_answer_is_passed_over() -> None:
    assert load(says(b"HTTP/1.1 100 Continue\r\n\r\n" + GOOD))[0].answers


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        (b"", "closed early", "closed without an answer"),
        (b"HTTP/1.1 200 OK\r\n", "closed early", "closed in the head"),
        (b"SSH-2.0-nonsense\r\n\r\n", "closed early", "begins with 'SSH-2.0-nonsense'"),
        (CUT, "closed early", "closed before the end"),
        (CUT + b"zz\r\n", "closed early", "is not the size of a chunk"),
        (stream([text_event("a")], done=False), "unfinished", "after 1 events"),
        (stream([text_event("a"), {"error": {"message": "the engine is dead"}}]), "error event", "the engine is dead"),
        (stream(["{broken"]), "bad event", "{broken"),
        (whole(200, {"choices": []}), "not a stream", "application/json"),
        (whole(503, {"error": {"message": "starting", "code": 503}}), "http 503", "starting"),
        (whole(422, {"detail": "no such field"}), "http 422", "no such field"),
        (whole(500, b"Internal Server Error"), "http 500", "Internal Server Error"),
        (whole(404, {}), "http 404", "{}"),
    ],
)
def test_faults_are_told_apart(said: bytes, kind: str, message: str) -> None:
    found = failure(says(said))
    assert found.kind == kind
    assert message in found.message
    assert found.sent is not None


def test_a_server_that_never_answers() -> None:
    async def silent(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    assert failure(silent, timeout=0.05).kind == "timeout"


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", held.getsockname()[1])
        run = asyncio.run(generate_load(OpenAIClient(address=address), [JOB], [0.0]))
        with pytest.raises(SidestreamError, match=f"{address} cannot be reached"):
            asyncio.run(OpenAIClient(address=address).models())
    (outcome,) = run.failures
    assert outcome.kind == "no connection"
    assert outcome.sent is None
    assert (run.delays, run.max_in_flight) == ((), 0)


def test_a_secure_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TLS, by name, the certificate checked: of an authority that is not known it is refused."""
    files = {name: str(tmp_path / name) for name in ("key", "certificate")}
    options = ["-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    made = ["openssl", "req", "-x509", *options, "-keyout", files["key"], "-out", files["certificate"]]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files["certificate"], files["key"])

    async def run() -> Answer:
        async with fake_server(says(GOOD), ssl=context) as fake:
            address = await looked_up(Address.of(fake.url.replace("127.0.0.1", "localhost")))
            assert address.ip == "127.0.0.1"
            return await OpenAIClient(address=address, model="fake").ask(JOB)

    _certificates.cache_clear()
    with pytest.raises(OSError, match="certificate verify failed"):
        asyncio.run(run())
    monkeypatch.setenv("SSL_CERT_FILE", files["certificate"])
    _certificates.cache_clear()
    assert asyncio.run(run()).times.completion_tokens == 12
    _certificates.cache_clear()


def test_every_kind_is_explained() -> None:
    assert len(FAILURES) == len(set(FAILURES.values())) == 7


@pytest.mark.parametrize(("limit", "most"), [(None, 6), (2, 2), (1, 1), (9, 6)])
def test_no_more_at_once_than_allowed(limit: int | None, most: int) -> None:
    """Each request is held until as many as may be are there; one too many would be seen."""
    there = highest = 0
    full = asyncio.Condition()

    async def held(asked: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal there, highest
        async with full:
            there += 1
            highest = max(highest, there)
            full.notify_all()
            await full.wait_for(lambda: highest == most)
        for _ in range(20):
            await asyncio.sleep(0)
        there -= 1
        writer.write(GOOD)

    run, fake = load(held, jobs=6, max_concurrency=limit)
    assert len(run.answers) == len(fake.asked) == 6
    assert highest == most
    assert run.max_in_flight <= most
    assert len(run.delays) == 6


def test_poisson_arrivals() -> None:
    first, again, other = (arrival_times(4000, 8.0, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first[0] == 0
    gaps = [b - a for a, b in pairwise(first)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert min(gaps) >= 0
    assert mean == pytest.approx(1 / 8, rel=0.05)
    assert spread == pytest.approx(1 / 8, rel=0.05), "an exponential's deviation is its mean"
    assert arrival_times(10, 8.0, seed=1) == first[:10]
    assert arrival_times(3, math.inf, seed=1) == [0.0, 0.0, 0.0]
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match=f"request_rate is {wrong}"):
            arrival_times(3, wrong, seed=0)


def test_requests_go_out_when_due() -> None:
    async def run() -> LoadRun:
        async with fake_server(says(GOOD)) as fake:
            client = OpenAIClient(address=Address.of(fake.url), model="fake")
            return await generate_load(client, [JOB] * 3, [0.0, 0.05, 0.1])

    found = asyncio.run(run())
    sent = [answer.times.sent for answer in found.answers]
    assert sent == sorted(sent)
    assert all(delay >= 0 for delay in found.delays), "none goes out before it is due"
    assert sent[2] - sent[0] >= 0.1 - found.delays[0]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000", ("localhost", 8000, "", False)),
        ("http://localhost:8000/v1/", ("localhost", 8000, "", False)),
        ("https://api.example.com/models/v1", ("api.example.com", 443, "/models", True)),
        ("http://[::1]:81", ("::1", 81, "", False)),
    ],
)
def test_addresses(url: str, expected: tuple[str, int, str, bool]) -> None:
    found = Address.of(url)
    assert (found.host, found.port, found.base, found.secure) == expected
    assert Address.of(str(found)) == found


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "url is ''"),
        ("localhost:8000", "must be like"),
        ("ftp://host", "must be like"),
        ("http://", "must be like"),
        ("http://host:x", "url is 'http://host:x'"),
        ("http://host:99999", "url is 'http://host:99999'"),
        ("http://me:secret@host:x", "a key goes into --api-key"),
        ("ftp://me:secret@host", "a key goes into --api-key"),
        ("http://host/?a=1", "no query and no fragment"),
    ],
)
def test_bad_addresses_are_named(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Address.of(url)
    assert "secret" not in str(caught.value)


def test_bad_clients_are_named() -> None:
    address = Address("localhost", 1)
    for settings, message in (
        ({"endpoint": "/v1/embeddings"}, "endpoint is '/v1/embeddings', allowed are /v1/completions and"),
        ({"api_key": "a\nb"}, "API key"),
        ({"api_key": "ключ"}, "API key"),
        ({"temperature": -1.0}, "temperature is -1.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            OpenAIClient(address=address, **settings)  # type: ignore[arg-type]
