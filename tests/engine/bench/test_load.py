"""The load generator against servers that answer as they should, and against others."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any

import pytest

from sidestream.engine.bench.load.arrivals import arrival_times
from sidestream.engine.bench.load.generator import LoadRun, generate_load
from sidestream.engine.bench.load.http_client import Address
from sidestream.engine.bench.load.measurement import LoadSettings, measure
from sidestream.engine.bench.load.objectives import Objectives
from sidestream.engine.bench.load.openai_client import CHAT, OpenAIClient
from sidestream.engine.bench.load.outcome import FAILURES, Failure
from sidestream.engine.bench.load.report import ServeReport
from sidestream.engine.bench.workload import Job, Workload
from sidestream.errors import ConfigError, SidestreamError
from tests.engine.bench.fake_server import (
    HEAD,
    Asked,
    FakeServer,
    Handler,
    chunk,
    event,
    fake_server,
    says,
    says_bytewise,
    says_each,
    stream,
    text_event,
    usage,
    whole,
)

GOOD = stream(
    [
        text_event("zwölf"),
        text_event(" Füchse 🦊"),
        text_event(".", reason="length"),
        {"choices": [], "usage": usage(7, 12)},
    ]
)
JOB = Job("How many?", 12)
NO_OBJECTIVES = Objectives.of([])


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


CUT = HEAD + chunk(event(text_event("a")))


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


def measured(
    handler: Handler, *, client: dict[str, Any] | None = None, **settings: Any
) -> tuple[ServeReport, FakeServer]:
    """A whole measurement of four prompts, one to warm up."""
    workload = Workload(dataset=settings.pop("dataset", "prose"), num_prompts=4, input_len=50, output_len=12)
    settings = {"num_warmups": 1, "objectives": NO_OBJECTIVES} | settings

    async def run() -> tuple[ServeReport, FakeServer]:
        async with fake_server(handler) as fake:
            asks = OpenAIClient(address=Address.of(fake.url), **client or {})
            return await measure(asks, workload, LoadSettings(**settings)), fake

    return asyncio.run(run())


async def counts_letters(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """A token for four characters and eight more for each prompt, as a chat's template would add."""
    prompt = asked.body["prompt"] if "prompt" in asked.body else asked.body["messages"][0]["content"]
    counts = usage(8 + len(prompt) // 4, 12, prompt_tokens_details={"cached_tokens": 3})
    writer.write(stream([text_event("a"), text_event("b", reason="length"), {"choices": [], "usage": counts}]))


def test_a_measurement() -> None:
    """Two prompts find the server's tokens a character, one warms up, four are measured; no two are equal."""
    report, fake = measured(counts_letters, objectives=Objectives.of(["ttft:1e6"]))
    found = json.loads(json.dumps(report.as_json(), allow_nan=False))
    prompts = [asked.body["prompt"] for asked in fake.asked]
    assert [len(prompts[0]), len(prompts[1])] == [200, 1000]
    assert len(set(prompts[2:])) == 5
    assert all(asked.body["model"] == "fake" for asked in fake.asked)
    assert found["kind"] == "serve"
    assert (found["model"], found["owned_by"], found["endpoint"]) == ("fake", "a test", "/v1/completions")
    assert (found["requests"], found["failed"], found["failures"]) == (4, 0, {})
    assert found["completion_tokens"] == 48
    assert 4 * 45 <= found["prompt_tokens"] <= 4 * 50
    assert (found["cached_tokens"], found["requests_without_usage"]) == (12, 0)
    assert found["goodput"]["requests"] == 4
    assert found["goodput"]["requests_per_s"] == pytest.approx(found["requests_per_s"])
    assert found["workload"]["request_rate"] == "inf"
    assert found["ttft_ms"]["count"] == found["e2e_ms"]["count"] == 4
    assert found["output_tokens_per_s"] == pytest.approx(48 / found["seconds"])
    assert list(report.warnings()) == []


def test_chats() -> None:
    report, fake = measured(counts_letters, client={"endpoint": CHAT, "api_key": "k", "extra": {"top_k": 3}})
    assert len(report.run.answers) == 4
    for asked in fake.asked:
        assert asked.path == CHAT
        assert asked.headers["authorization"] == "Bearer k"
        assert asked.body["messages"][0]["role"] == "user"
        assert asked.body["top_k"] == 3
        assert "max_tokens" not in asked.body
    assert {asked.body["max_completion_tokens"] for asked in fake.asked[2:]} == {12}


def test_token_ids_need_no_count() -> None:
    report, fake = measured(
        says(GOOD),
        dataset="random-ids",
        vocab_size=100,
        client={"model": "named", "ignore_eos": False, "continuous_usage": True},
    )
    assert len(fake.asked) == 5
    for asked in fake.asked:
        assert len(asked.body["prompt"]) == 50
        assert all(5 <= token < 100 for token in asked.body["prompt"])
        assert asked.body["model"] == "named"
        assert "ignore_eos" not in asked.body
        assert asked.body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert report.server["owned_by"] is None


def test_failures_are_counted_by_kind() -> None:
    answers = [GOOD, GOOD, whole(503, {"error": {"message": "full"}}), CUT, whole(503, b"again")]
    report, _ = measured(says_each(*answers), dataset="random-ids", vocab_size=100, max_concurrency=1)
    found = report.as_json()
    assert (found["requests"], found["failed"]) == (1, 3)
    assert found["failures"] == {
        "http 503": {"count": 2, "message": "full"},
        "closed early": {"count": 1, "message": "the connection closed before the end of the answer"},
    }
    assert found["completion_tokens"] == 12, "what broke off is in no figure"
    assert len(list(report.warnings())) == 2


def test_nothing_answered_is_a_report_too() -> None:
    report, _ = measured(says(whole(500, b"no")), dataset="random-ids", vocab_size=100, num_warmups=0)
    found = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert (found["requests"], found["failed"], found["output_tokens_per_s"]) == (0, 4, 0)
    assert found["ttft_ms"] is None
    assert list(report.lines())
    assert not list(report.rows())


def test_a_server_without_usage_is_named() -> None:
    silent = stream([text_event("a b c"), text_event("d", reason="length")])
    report, _ = measured(says(silent), dataset="random-ids", vocab_size=100)
    found = report.as_json()
    assert found["requests_without_usage"] == 4
    assert (found["prompt_tokens"], found["total_tokens_per_s"], found["cached_tokens"]) == (None, None, None)
    assert "events with text are taken for tokens" in " ".join(report.warnings())
    with pytest.raises(ConfigError, match="counts no prompt tokens; give --tokenizer"):
        measured(says(silent))


def test_short_answers_are_named() -> None:
    short = stream([text_event("a", reason="stop"), {"choices": [], "usage": usage(7, 2)}])
    report, _ = measured(says(short), dataset="random-ids", vocab_size=100)
    assert list(report.warnings()) == ["answers have 2 to 2 tokens, 12 were asked for"]


def refused(work: Coroutine[Any, Any, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        asyncio.run(work)


def test_servers_that_cannot_be_measured_are_named() -> None:
    with pytest.raises(SidestreamError, match="does not answer a short prompt: http 400: no such field"):
        measured(says(whole(400, {"error": {"message": "no such field"}})))
    with pytest.raises(SidestreamError, match="no request of the warm-up was answered: http 400: too long"):
        measured(says(whole(400, {"error": {"message": "too long"}})), dataset="random-ids", vocab_size=100)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (whole(401, {"error": {"message": "no key"}}), "answered 401: no key; give --api-key"),
        (whole(503, {"error": {"message": "starting"}}), "answered 503: starting"),
        (whole(200, {"models": []}), "is not a list of models"),
        (whole(200, {"data": [3]}), "is not a list of models"),
        (whole(200, b"<html>"), "is not a list of models"),
        (b"", "cannot be reached: the connection closed without an answer"),
        (whole(404, {}), "lists no models; give --served-model-name"),
        (whole(200, {"data": []}), "lists no models; give --served-model-name"),
    ],
)
def test_lists_of_models_that_are_none(said: bytes, message: str) -> None:
    async def run() -> None:
        async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            writer.close()

        server = await asyncio.start_server(other, "127.0.0.1", 0)
        async with server:
            address = Address(*server.sockets[0].getsockname())
            settings = LoadSettings(objectives=NO_OBJECTIVES, vocab_size=100)
            await measure(OpenAIClient(address=address), Workload(dataset="random-ids", num_prompts=1), settings)

    refused(run(), SidestreamError, message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"request_rate": 0.0}, "request_rate is 0.0, more than 0"),
        ({"max_concurrency": 0}, "max_concurrency is 0, at least 1"),
        ({"timeout": 0.0}, "timeout is 0.0, more than 0"),
        ({"timeout": math.nan}, "timeout is nan, more than 0"),
        ({"num_warmups": -1}, "num_warmups is -1, at least 0"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoadSettings(objectives=NO_OBJECTIVES, **settings)


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


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "http://host:x", "http://host:99999"])
def test_bad_addresses_are_named(url: str) -> None:
    with pytest.raises(ConfigError, match="url is"):
        Address.of(url)


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
    ids = Workload(dataset="random-ids")
    settings = LoadSettings(objectives=NO_OBJECTIVES)
    refused(measure(OpenAIClient(address=address), ids, settings), ConfigError, "needs --vocab-size")
    chat = OpenAIClient(address=address, endpoint=CHAT)
    refused(measure(chat, ids, settings), ConfigError, "takes no token ids")
