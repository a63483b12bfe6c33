"""Requests that nobody means, though they are no plain mistakes: each is answered soon, and none with a 5xx."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.live_server import LiveServer

MESSAGE = {"role": "user", "content": "a"}
SHORT = {"prompt": "a", "max_tokens": 3}
CHAT: dict[str, Any] = {"messages": [MESSAGE], "max_tokens": 3}


def nested(levels: int, inner: Any = 1) -> Any:
    """Objects within each other."""
    for _ in range(levels):
        inner = {"a": inner}
    return inner


def schema(levels: int) -> Any:
    """Of such objects: two levels of JSON each."""
    made: Any = {"type": "integer"}
    for _ in range(levels):
        made = {"type": "object", "properties": {"a": made}, "required": ["a"]}
    return made


def form(**fields: Any) -> dict[str, Any]:
    return SHORT | {"structured_outputs": fields}


def call(arguments: str) -> dict[str, Any]:
    calls = [{"type": "function", "id": "1", "function": {"name": "f", "arguments": arguments}}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": nested(80)}}}
SERVED: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", CHAT | {"chat_template_kwargs": nested(97)}),
    ("chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "auto"}),
    ("chat/completions", CHAT | {"messages": [MESSAGE | {"name": "x" * 100_000}]}),
    ("chat/completions", CHAT | {"messages": [{"role": "developer", "content": "a"}]}),
    ("chat/completions", CHAT | {"messages": [{"role": "user", "content": []}]}),
    ("completions", form(json=schema(40))),
    ("completions", form(json=json.dumps(schema(40)))),
    ("completions", form(json={"$ref": "http://elsewhere/schema"})),
    ("completions", form(json={"type": "string", "minLength": 10**7})),
    ("completions", form(regex="((a{1,100}){1,100}){1,100}")),
    ("completions", form(regex="")),
    ("completions", form(grammar='root ::= root "a" | "b"')),
    ("completions", form(grammar="root ::= root")),
    ("completions", form(choice=["", "\x00"])),
    ("completions", SHORT | {"prompt": "\x00\u202e\ufeff"}),
    ("completions", SHORT | {"stop": "x" * 900_000}),
    ("completions", SHORT | {"temperature": 1e308, "top_p": 1e-300, "seed": -(2**63)}),
    ("completions", SHORT | {"cache_salt": "x" * 100_000, "user": "x" * 100_000}),
    ("completions", {**SHORT, "prompt": [[1], [2]] * 20, "stream": True, "n": 1}),
]
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("completions", form(json=json.dumps(schema(60))), "structured_outputs.json has more than 100 levels", "json"),
    ("completions", form(json="nonsense"), "structured_outputs.json is not JSON: Expecting value", "json"),
    ("completions", form(json='{"minimum": NaN}'), "structured_outputs.json.minimum is NaN", "json"),
    ("completions", form(json='{"a": 1, "a": 2}'), "structured_outputs.json holds 'a' twice in one object", "json"),
    ("completions", form(regex="(" * 60_000), "structured_outputs cannot be compiled", "structured_outputs"),
    (
        "completions",
        SHORT | {"logit_bias": {"\uff15": 1}},
        "logit_bias holds '\uff15', which is not a token id",
        "logit_bias",
    ),
    ("completions", SHORT | {"logit_bias": {"9" * 30: 1}}, "which is not a token id", "logit_bias"),
    ("chat/completions", CHAT | {"messages": [call("[" * 90_000)]}, "not JSON", "messages"),
    ("chat/completions", CHAT | {"messages": [MESSAGE | {"name": nested(90)}]}, "name must be text", "messages.0.name"),
    ("chat/completions", CHAT | {"chat_template_kwargs": {"self": 1}}, "holds 'self'", "chat_template_kwargs"),
    ("chat/completions", CHAT | {"messages": [MESSAGE] * 20_000}, "max_model_len", "messages"),
]


@pytest.mark.parametrize(("path", "body"), SERVED)
def test_what_can_be_served_is(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    status, answer = server.post(f"/v1/{path}", body)
    assert status == 200, answer


@pytest.mark.parametrize(("path", "body", "says", "param"), REFUSED)
def test_what_cannot_be_served_is_refused(
    server: LiveServer, path: str, body: dict[str, Any], says: str, param: str
) -> None:
    status, answer = server.post(f"/v1/{path}", body)
    assert status == 400, answer
    assert says in answer["error"]["message"]
    assert param in answer["error"]["param"]
    assert len(answer["error"]["message"]) < 400


def test_a_request_id_is_a_matter_of_the_client(server: LiveServer) -> None:
    """Two of the same name have nothing to do with each other."""
    answers = [server.post("/v1/completions", SHORT, **{"x-request-id": "same"}) for _ in range(2)]
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0][1]["id"] != answers[1][1]["id"]


def test_nothing_is_left_of_them(server: LiveServer) -> None:
    server.await_idle()
    assert "sidestream:requests_refused_total" in server.get("/metrics")[1]
    assert server.metric("sidestream:requests_refused_total", status="500") == 0
