"""Whole measurements of a server: prompts of its tokens, a warm-up, figures, and what cannot be measured."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from sidestream.engine.bench.load.http_client import Address
from sidestream.engine.bench.load.measurement import LoadSettings, measure
from sidestream.engine.bench.load.objectives import Objectives
from sidestream.engine.bench.load.openai_client import CHAT, COMPLETIONS, OpenAIClient
from sidestream.engine.bench.load.report import ServeReport
from sidestream.engine.bench.workload import Workload
from sidestream.errors import ConfigError, SidestreamError
from tests.engine.bench.fake_server import (
    CUT,
    GOOD,
    Asked,
    FakeServer,
    Handler,
    fake_server,
    says,
    says_each,
    stream,
    text_event,
    usage,
    whole,
)

NO_OBJECTIVES = Objectives.of([])


def measured(
    handler: Handler,
    *,
    client: dict[str, Any] | None = None,
    count: Callable[[Any], int] | None = None,
    **settings: Any,
) -> tuple[ServeReport, FakeServer]:
    """A whole measurement of four prompts, one to warm up."""
    workload = Workload(dataset=settings.pop("dataset", "prose"), num_prompts=4, input_len=50, output_len=12)
    settings = {"num_warmups": 1, "objectives": NO_OBJECTIVES} | settings

    async def run() -> tuple[ServeReport, FakeServer]:
        async with fake_server(handler, count=count) as fake:
            asks = OpenAIClient(address=Address.of(fake.url), **client or {})
            return await measure(asks, workload, LoadSettings(**settings)), fake

    return asyncio.run(run())


def letters(body: Any) -> int:
    """A token for four characters and eight more for each prompt, as a chat's template would add."""
    prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return 8 + len(prompt) // 4


def words(body: Any) -> int:
    """A token a word, and two for one that begins with a vowel."""
    prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return 3 + sum(1 + (word[0] in "aeiou") for word in prompt.split())


async def counts_letters(asked: Asked, writer: asyncio.StreamWriter) -> None:
    counts = usage(letters(asked.body), 12, prompt_tokens_details={"cached_tokens": 3})
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
    assert found["server_version"] == "0.33.0"
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


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_where_the_server_tokenizes_every_prompt_is_as_long_as_asked(endpoint: str) -> None:
    """And no short prompt is sent to find out."""
    report, fake = measured(counts_letters, count=letters, client={"endpoint": endpoint})
    assert [letters(asked.body) for asked in fake.asked] == [50] * 5
    assert report.prompt_length == "50 tokens"
    assert len({str(asked.body) for asked in fake.asked}) == 5


def test_where_no_beginning_has_so_many_tokens_a_prompt_is_one_short() -> None:
    _, fake = measured(counts_letters, count=words)
    assert {words(asked.body) for asked in fake.asked} <= {49, 50}
    with pytest.raises(ConfigError, match="input_len is 50, and no prompt of this server has so few tokens"):
        measured(counts_letters, count=lambda body: 51)


def test_lengths_that_are_not_as_asked_are_told() -> None:
    report, _ = measured(counts_letters)
    mean = report.rates.prompt_tokens / 4 if report.rates.prompt_tokens is not None else 0
    assert mean < 50
    assert report.prompt_length == f"{mean:.1f} tokens on average (50 were asked for)"


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


def test_parts_that_do_not_go_together_are_named() -> None:
    address = Address("localhost", 1)
    ids = Workload(dataset="random-ids")
    settings = LoadSettings(objectives=NO_OBJECTIVES)
    refused(measure(OpenAIClient(address=address), ids, settings), ConfigError, "needs --vocab-size")
    chat = OpenAIClient(address=address, endpoint=CHAT)
    refused(measure(chat, ids, settings), ConfigError, "takes no token ids")
