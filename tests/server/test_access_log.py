"""The access log: one line a request, what stands in it, and what never does."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import pytest

from sidestream.core.request import FinishReason
from sidestream.engine.async_engine import Delta
from sidestream.engine.input_processor import ProcessedPrompt
from sidestream.errors import EngineDeadError, RequestError
from tests.server.in_process import StandIn, call, make
from tests.server.live_server import live_server

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
SECONDS = r"\d+\.\d{3}s"
PROMPT = "Question: What is 12 + 30?\nAnswer:"
SECRET = "xylophone"


def logged(**settings: Any) -> tuple[Any, StandIn, list[str]]:
    app, service, engine = make(**settings)
    lines: list[str] = []
    service.on_answered = lines.append
    return app, engine, lines


def answering(engine: StandIn, *reasons: FinishReason | None) -> None:
    """Each prompt gets a completion of one token more than the last, which ends so; 7 of its tokens were cached."""

    async def script(batch: Sequence[ProcessedPrompt]) -> AsyncGenerator[list[Delta], None]:
        for index, (prompt, reason) in enumerate(zip(batch, reasons, strict=True)):
            output = engine.delta(prompt, SECRET, None).output
            output.cached_tokens = 7
            for made in range(index + 1):
                yield [Delta(index, 0, SECRET, 5, None, reason if made == index else None, None, output)]

    engine.script = script


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_a_line_tells_of_a_completion_all_but_what_it_said(chat: bool, stream: bool) -> None:
    app, engine, lines = logged()
    answering(engine, FinishReason.STOP)
    said: dict[str, Any] = {"messages": [{"role": "user", "content": SECRET}]} if chat else {"prompt": f"{SECRET} is"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    answer = call(app, "POST", path, json=said | {"stream": stream, "stream_options": None})
    assert answer.status_code == 200
    (line,) = lines
    name = re.search(r'"id": ?"((?:chat)?cmpl-[0-9a-f]+)"', answer.text)
    assert name is not None
    prompt = answer.json()["usage"]["prompt_tokens"] if not stream else r"\d+"
    tokens = f"prompt={prompt} cached=7 output=1"
    assert re.fullmatch(f"{TIME} POST {path} 200 {name[1]} {tokens} first={SECONDS} whole={SECONDS} finish=stop", line)
    assert SECRET not in line


def test_several_prompts_are_one_line() -> None:
    app, engine, lines = logged()
    answering(engine, FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP)
    usage = call(app, "POST", "/v1/completions", json={"prompt": [PROMPT, PROMPT, "Hello"]}).json()["usage"]
    (line,) = lines
    assert f" prompt={usage['prompt_tokens']} cached=21 output=6 " in line
    assert line.endswith(" finish=length:1,stop:2")


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_leaves_unfinished_was_aborted(stream: bool) -> None:
    app, engine, lines = logged()

    async def dies(batch: Sequence[ProcessedPrompt]) -> AsyncGenerator[list[Delta], None]:
        yield [engine.delta(batch[0], "half an")]
        raise EngineDeadError("the engine's process ended")

    engine.script = dies
    call(app, "POST", "/v1/completions", json={"prompt": PROMPT, "stream": stream})
    (line,) = lines
    assert f" /v1/completions {200 if stream else 503} cmpl-" in line
    assert " output=1 " in line
    assert line.endswith(" finish=abort")


def test_what_is_scored_generates_nothing() -> None:
    app, engine, lines = logged()
    answering(engine, FinishReason.LENGTH)
    asked = {"prompt": PROMPT, "max_tokens": 0, "echo": True}
    assert call(app, "POST", "/v1/completions", json=asked).json()["usage"]["completion_tokens"] == 0
    (line,) = lines
    assert " output=0 " in line
    metrics = call(app, "GET", "/metrics").text
    for name in ("generation_tokens_total", "request_generation_tokens_sum", "request_params_max_tokens_sum"):
        assert re.search(rf"^vllm:{name}{{.*}} 0.0$", metrics, re.MULTILINE), name


def test_what_the_engine_refuses_was_not_aborted() -> None:
    app, engine, lines = logged()

    async def refuses(batch: Sequence[ProcessedPrompt]) -> AsyncGenerator[list[Delta], None]:
        raise RequestError(f"structured_outputs.regex cannot be compiled: {SECRET}")
        yield []

    engine.script = refuses
    assert call(app, "POST", "/v1/completions", json={"prompt": PROMPT}).status_code == 400
    assert lines[0].endswith(" finish=refused")
    assert SECRET not in lines[0]


def test_what_has_no_completion_has_no_tokens() -> None:
    app, _, lines = logged(api_key=None)
    call(app, "POST", "/tokenize", json={"prompt": SECRET})
    call(app, "POST", "/v1/completions", json={"prompt": SECRET, "temperature": -1})
    call(app, "GET", f"/no such%0A{'x' * 500}?{SECRET}")
    call(app, "POST", "/v1/completions", content=f'{{"prompt": "{SECRET}'.encode())
    ends = [re.fullmatch(rf"{TIME} (.*) whole={SECONDS}", line) for line in lines]
    assert [end[1] for end in ends if end] == [
        "POST /tokenize 200 -",
        "POST /v1/completions 400 -",
        f"GET {('/no%20such%0A' + 'x' * 500)[:200]} 404 -",
        "POST /v1/completions 400 -",
    ]
    assert SECRET not in "".join(lines)


def test_probes_and_the_dashboard_have_no_line() -> None:
    app, _, lines = logged(api_key="secret")
    for path in ("/", "/health", "/metrics", "/dashboard", "/ledger"):
        call(app, "GET", path)
    assert lines == []
    call(app, "GET", "/v1/models")
    assert re.fullmatch(rf"{TIME} GET /v1/models 401 - whole={SECONDS}", lines[0])


def test_without_it_nothing_is_followed() -> None:
    app, engine, lines = logged(access_log=False)
    answering(engine, FinishReason.STOP)
    assert call(app, "POST", "/v1/completions", json={"prompt": PROMPT}).status_code == 200
    assert lines == []


def test_a_servers_lines_and_a_client_that_goes_away() -> None:
    with live_server() as server:
        server.await_ready()
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 64}
        for _ in range(3):
            assert server.post("/v1/completions", body)[0] == 200
        server.get("/metrics")
        with httpx.stream(
            "POST",
            server.url + "/v1/completions",
            json=body | {"max_tokens": 20000, "stream": True, "ignore_eos": True},
        ) as answer:
            next(answer.iter_lines())
        server.await_idle()
    lines = [line for line in server.lines if re.match(TIME, line)]
    assert len(lines) == 4
    for line in lines[:3]:
        assert re.search(rf" prompt=15 cached=\d+ output=\d+ first={SECONDS} whole={SECONDS} finish=stop$", line)
    assert lines[3].rstrip().endswith("finish=abort")
    assert "12 + 30" not in "".join(lines)


def test_a_quiet_server_writes_no_line() -> None:
    with live_server("--no-access-log") as server:
        server.await_ready()
        assert server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})[0] == 200
    assert not any(re.match(TIME, line) for line in server.lines)
