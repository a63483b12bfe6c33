"""What clients read when a body is wrong: field, value and limit in our words, nothing of a library's."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, get_type_hints

import pytest
from fastapi import FastAPI
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams
from pydantic import BaseModel, ValidationError

from sidestream.server.complaints import complaint
from sidestream.server.protocol import ChatRequest, CompletionRequest, FunctionDefinition, Message
from tests.server.in_process import call, error_of, make

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
TOO_LONG = " and the engine serves sequences of at most 256, prompt and completion together (max_model_len)"
DEEP = "the body has more than 100 levels of objects and lists"
NOT_FINITE = ", which is not JSON: numbers must be finite"
INTERNALS = re.compile(
    r"Input should|Extra inputs|Field required|Value error|pydantic|instance of|function-after|constrained-|errors\."
    r"|Traceback|\.cc:|Check failed|object at 0x|\bNone\b|\bTrue\b|\bdict\b|\blist\[|https?://"
)

COMPLETIONS: list[tuple[dict[str, Any], str, str, str]] = [
    ({}, "prompt is missing", "prompt", "missing_required_parameter"),
    ({"prompt": 5}, "prompt must be text or a list, got 5", "prompt", "invalid_type"),
    ({"prompt": None}, "prompt must be text or a list, got null", "prompt", "invalid_type"),
    ({"prompt": True}, "prompt must be text or a list, got true", "prompt", "invalid_type"),
    ({"prompt": [1, "a"]}, "prompt.1 must be an integer, got 'a'", "prompt.1", "invalid_type"),
    ({"prompt": ["a", 1]}, "prompt.1 must be text, got 1", "prompt.1", "invalid_type"),
    ({"prompt": [[1], [2, "x"]]}, "prompt.1.1 must be an integer, got 'x'", "prompt.1.1", "invalid_type"),
    ({"prompt": [{}]}, "prompt.0 must be text or an integer or a list, got {}", "prompt.0", "invalid_type"),
    (
        {"prompt": [10**30]},
        f"prompt.0 is {10**30}, allowed is at most 9223372036854775807",
        "prompt.0",
        "integer_above_max_value",
    ),
    (
        {"seed": -(2**70)},
        f"seed is {-(2**70)}, allowed is at least -9223372036854775808",
        "seed",
        "integer_below_min_value",
    ),
    ({"prompt": ["\ud800"]}, "prompt.0 holds half a surrogate pair at character 0", "prompt.0", "invalid_value"),
    ({"n": 1.5}, "n must be an integer, got 1.5", "n", "invalid_type"),
    ({"temperature": "x"}, "temperature must be a number, got 'x'", "temperature", "invalid_type"),
    ({"stream": 1}, "stream must be true or false, got 1", "stream", "invalid_type"),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5 must be a number, got 'x'", "logit_bias.5", "invalid_type"),
    ({"logit_bias": [1]}, "logit_bias must be an object, got [1]", "logit_bias", "invalid_type"),
    ({"stop": [5]}, "stop.0 must be text, got 5", "stop.0", "invalid_type"),
    (
        {"suffix": "x"},
        "suffix is 'x', which is not supported here; leave it out",
        "suffix",
        "unsupported_parameter",
    ),
    ({"stream_options": 5}, "stream_options must be an object, got 5", "stream_options", "invalid_type"),
    (
        {"stream_options": {"x": {"y": None}}},
        "'x' is not a field of stream_options",
        "stream_options.x",
        "unknown_parameter",
    ),
    (
        {"response_format": {"type": "poem"}},
        "response_format.type must be 'text', 'json_object' or 'json_schema', got 'poem'",
        "response_format.type",
        "invalid_value",
    ),
    (
        {"structured_outputs": {"json": 5}},
        "structured_outputs.json must be an object or text, got 5",
        "structured_outputs.json",
        "invalid_type",
    ),
    ({"request_id": "again"}, "'request_id' is not a field of this request", "request_id", "unknown_parameter"),
    ({"top_k": -2}, "top_k is -2, allowed is >= -1", "top_k", "invalid_value"),
    ({"min_tokens": 5, "max_tokens": 2}, "min_tokens 5 is larger than max_tokens 2", "min_tokens", "invalid_value"),
    ({"prompt": ""}, "the prompt is an empty string", "prompt", "invalid_value"),
    (
        {"prompt": [5] * 300},
        "the prompt has 300 tokens" + TOO_LONG,
        "prompt",
        "context_length_exceeded",
    ),
    ({"prompt": [-1]}, "prompt holds token id -1, the model's vocabulary is 0 to {last}", "prompt", "invalid_value"),
    (
        {"stop_token_ids": [10**9]},
        "stop_token_ids holds token id 1000000000, the model's vocabulary is 0 to {last}",
        "stop_token_ids",
        "invalid_value",
    ),
    (
        {"prompt": ["a"] * 9, "n": 128},
        "n is 128 for 9 prompts, which are 1152 sequences; the limit is 1024 (max_sequences)",
        "n",
        "invalid_value",
    ),
]

CHATS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"messages": []}, "messages has 0 items, allowed is at least 1", "messages", "empty_array"),
    ({"messages": [5]}, "messages.0 must be an object, got 5", "messages.0", "invalid_type"),
    (
        {"messages": [{"role": "wizard", "content": "x"}]},
        "messages.0.role must be 'system', 'developer', 'user', 'assistant' or 'tool', got 'wizard'",
        "messages.0.role",
        "invalid_value",
    ),
    ({"messages": [{"content": "x"}]}, "messages.0.role is missing", "messages.0.role", "missing_required_parameter"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content holds a part of type 'image_url'; this model reads text only",
        "messages.0.content",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": 5, "text": "x"}]}]},
        "messages.0.content.0.type must be 'text', got 5",
        "messages.0.content.0.type",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "weight": 1}]},
        "'weight' is not a field of messages.0",
        "messages.0.weight",
        "unknown_parameter",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]},
        'messages.0.audio is {"id": "a"}, which is not supported here; leave it out',
        "messages.0.audio",
        "unsupported_parameter",
    ),
    (
        {"reasoning_effort": "low"},
        "reasoning_effort is 'low', which is not supported here; leave it out",
        "reasoning_effort",
        "unsupported_parameter",
    ),
    (
        {"messages": [{"role": "user"}]},
        "messages.0: a message needs content, or tool_calls",
        "messages.0",
        "invalid_value",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": ""}}]},
        "tools.0.function.name has 0 characters, allowed is at least 1",
        "tools.0.function.name",
        "empty_string",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "a" * 257}}]},
        "tools.0.function.name has 257 characters, allowed is at most 256",
        "tools.0.function.name",
        "string_above_max_length",
    ),
    (
        {"logprobs": True, "top_logprobs": 1000},
        "top_logprobs is 1000, allowed is from 0 to 64",
        "top_logprobs",
        "invalid_value",
    ),
    (
        {"top_logprobs": 2},
        "top_logprobs is given, which needs logprobs to be true",
        "top_logprobs",
        "invalid_value",
    ),
    (
        {"max_completion_tokens": 0},
        "max_completion_tokens is 0, allowed is >= 1",
        "max_completion_tokens",
        "invalid_value",
    ),
    (
        {"max_completion_tokens": 6, "max_tokens": 5},
        "max_completion_tokens is 6 and max_tokens 5; give one of them",
        "max_completion_tokens",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "user", "content": "many words " * 300}]},
        "the prompt has {count} tokens" + TOO_LONG,
        "messages",
        "context_length_exceeded",
    ),
]


@pytest.mark.parametrize(
    ("model", "names", "body"),
    [
        (ChatRequest, get_type_hints(ChatParams), HELLO),
        (CompletionRequest, get_type_hints(CompletionParams), {"prompt": "a"}),
        (Message, ChatCompletionMessage.model_fields, {"role": "assistant", "content": "a"}),
    ],
)
def test_every_field_of_openai_s_may_be_null(
    model: type[BaseModel], names: Collection[str], body: dict[str, Any]
) -> None:
    assert len(names) > 5
    read = model.model_validate(dict.fromkeys(names) | body)
    assert read.model_dump(exclude_none=True) == body


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return make()[0]


def check(error: dict[str, Any], message: str, param: str, code: str) -> None:
    pattern = re.escape(message).replace(r"\{last\}", r"\d+").replace(r"\{count\}", r"\d+")
    assert re.fullmatch(pattern, error["message"]), error["message"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert not INTERNALS.search(error["message"])


@pytest.mark.parametrize(("changes", "message", "param", "code"), COMPLETIONS)
def test_a_completion(app: FastAPI, changes: dict[str, Any], message: str, param: str, code: str) -> None:
    body = {"prompt": "fine"} | changes if changes else {}
    raw = json.dumps(body).encode()  # in ASCII, so that half a surrogate pair can be spelt
    answer = call(app, "POST", "/v1/completions", content=raw, headers={"content-type": "application/json"})
    check(error_of(answer), message, param, code)


@pytest.mark.parametrize(("changes", "message", "param", "code"), CHATS)
def test_a_chat(app: FastAPI, changes: dict[str, Any], message: str, param: str, code: str) -> None:
    check(error_of(call(app, "POST", "/v1/chat/completions", json=HELLO | changes)), message, param, code)


@pytest.mark.parametrize(
    ("path", "body", "name", "meant"),
    [
        ("/v1/completions", {"max_token": 5}, "max_token", "max_tokens"),
        ("/v1/completions", {"temprature": 5}, "temprature", "temperature"),
        ("/v1/completions", {"topk": 5}, "topk", "top_k"),
        ("/v1/completions", {"max_token": 5, "max_tokens": 6}, "max_token", None),
        ("/v1/completions", {"max_completion_tokens": 5}, "max_completion_tokens", None),
        ("/v1/completions", {"top_a": 5}, "top_a", None),
        ("/v1/completions", {"messages": []}, "messages", None),
        ("/v1/completions", {"stream_options": {"include_usge": True}}, "include_usge", "include_usage"),
        ("/v1/completions", {"stream_options": {"temprature": 1}}, "temprature", None),
        ("/v1/chat/completions", {"top_logprob": 5}, "top_logprob", "top_logprobs"),
        ("/v1/chat/completions", {"prompt": "x"}, "prompt", None),
        ("/v1/chat/completions", {"reasoning_efort": "low"}, "reasoning_efort", None),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "jsn_schema": {}}},
            "jsn_schema",
            "json_schema",
        ),
        ("/tokenize", {"add_special_token": True}, "add_special_token", "add_special_tokens"),
    ],
)
def test_a_name_is_offered_only_where_it_is_near(
    app: FastAPI, path: str, body: dict[str, Any], name: str, meant: str | None
) -> None:
    whole = (HELLO if "chat" in path else {"prompt": "fine"}) | body
    error = error_of(call(app, "POST", path, json=whole))
    hint = f"; is {meant!r} meant?" if meant else ""
    assert error["message"].startswith(f"{name!r} is not a field of ")
    assert error["message"].endswith(hint or "request") or not meant
    assert ("meant" in error["message"]) is bool(meant)
    assert error["param"].split(".")[-1] == name


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body is empty or null, it must be a JSON object"),
        (b"null", "the body is empty or null, it must be a JSON object"),
        (b"[]", "the body must be a JSON object, got []"),
        (b'"text"', "the body must be a JSON object, got 'text'"),
        (b"{", "the body is not JSON: Expecting property name enclosed in double quotes at line 1, column 2"),
        (b'{"prompt": "\xff"}', "the body is not text in UTF-8: byte 12 is 0xff"),
        (b"[" * 100_000, DEEP),
        (b"[" * 101 + b"]" * 101, DEEP),
        (b'{"prompt": "a", "temperature": NaN}', "temperature is NaN" + NOT_FINITE),
        (
            b'{"prompt": "a", "temperature": -Infinity}',
            "temperature is -Infinity, which is not JSON: numbers must be finite",
        ),
        (
            b'{"prompt": "a", "logit_bias": {"5": 1e999}}',
            "logit_bias.5 is Infinity, which is not JSON: numbers must be finite",
        ),
        (b'{"prompt": "a", "n": 1, "n": 2}', "the body holds 'n' twice in one object"),
        (
            b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
            "the body holds an integer of more digits than any field takes",
        ),
        (
            b'{"prompt": "a", "logit_bias": {' + b",".join(b'"%d":1' % i for i in range(65537)) + b"}}",
            "the body holds an object of 65537 names, the limit is 65536",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_body_that_is_no_proper_json(app: FastAPI, path: str, body: bytes, says: str) -> None:
    error = error_of(call(app, "POST", path, content=body, headers={"content-type": "application/json"}))
    assert error["message"] == says
    assert not INTERNALS.search(error["message"])


@pytest.mark.parametrize("given", ["text/plain", "application/x-www-form-urlencoded", "", "nonsense", "a/b;" * 50])
def test_another_content_type(app: FastAPI, given: str) -> None:
    headers = {"content-type": given} if given else {}
    error = error_of(call(app, "POST", "/v1/completions", content=b'{"prompt": "a"}', headers=headers))
    assert "it must be application/json" in error["message"]
    assert error["code"] == "invalid_content_type"
    assert len(error["message"]) < 300


def test_a_long_value_is_cut(app: FastAPI) -> None:
    for value in ("x" * 10**6, ["x"] * 10**5, {"a" * 10**5: 1}, [[[["x" * 10**5]]]]):
        error = error_of(call(app, "POST", "/v1/completions", json={"prompt": "a", "n": value}))
        assert len(error["message"]) < 300, error["message"][:400]
    error = error_of(call(app, "POST", "/v1/completions", json={"prompt": "a", "x" * 10**6: 1}))
    assert max(len(error["message"]), len(error["param"])) < 300


def test_a_list_is_read_up_to_its_first_fault() -> None:
    """Complaints of millions of items would take far more memory than the body they are about."""
    wrong: list[Any] = ["a"] * 1000 + [1] * 1000
    for model, body in (
        (CompletionRequest, {"prompt": wrong}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 1000}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * 1000}),
        (ChatRequest, {"messages": wrong}),
        (ChatRequest, HELLO | {"tools": wrong}),
        (ChatRequest, {"messages": [{"role": "user", "content": wrong}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": "x", "tool_calls": wrong}]}),
    ):
        with pytest.raises(ValidationError) as caught:
            model.model_validate(body)
        assert caught.value.error_count() <= 4, body.keys()


def test_a_kind_of_complaint_that_is_not_known_says_nothing_of_its_maker() -> None:
    found = {"type": "brand_new", "loc": ("body", "name"), "msg": "Input should be better", "input": 5}
    error = complaint([found], {"name": 5}, FunctionDefinition, content_type="application/json")
    assert error.body["error"]["message"] == "name cannot be 5"
