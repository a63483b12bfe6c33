"""Calls that must come: whatever a model without any idea of the format would say, ``openai`` gets valid calls."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest

from sidestream.engine.llm import bundled_model
from tests.server.live_server import live_server

MODEL = "model"
CHAT: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
ADD = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"type": "string", "enum": ["m", "km"]},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["a", "unit", "note"],
    "additionalProperties": False,
}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"add": ADD, "now": NOW}
TOOLS: list[Any] = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
NAMED: Any = {"type": "function", "function": {"name": "add"}}
TEMPLATE = (
    "{%- for m in messages -%}<|user|>\n{{ m.content }}{%- endfor -%}"
    "<|assistant|>{{ '<think>' if thinking else '</think>' }}"
)


@pytest.fixture(scope="module", params=["glm", "deepseek_v31", "deepseek_v32"])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp(request.param) / MODEL
    shutil.copytree(bundled_model(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    options = ("--answer-parser", request.param, "--served-model-name", MODEL, "--max-num-seqs", "4")
    with live_server(str(folder), *options) as server:
        server.await_ready()
        with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as made:
            yield made


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    body = {"model": MODEL, "messages": CHAT, "tools": TOOLS, "max_tokens": 300, "temperature": 0} | fields
    return client.chat.completions.create(**body).choices[0]


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, list[tuple[str, str]], str]:
    """Content, calls as (name, arguments), and why it ended."""
    body = {"model": MODEL, "messages": CHAT, "tools": TOOLS, "max_tokens": 300, "temperature": 0} | fields
    content, reason = "", ""
    calls: list[tuple[str, str]] = []
    for chunk in client.chat.completions.create(stream=True, **body):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(calls)
                calls.append((call.function.name, ""))
            calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.function.arguments)
        reason = choice.finish_reason or reason
    return content, calls, reason


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        assert jsonschema_rs.is_valid(SCHEMAS[name], json.loads(arguments)), (name, arguments)


def test_required_calls_come_with_valid_arguments(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    choice = ask(client, **fields)
    calls = calls_of(choice)
    assert len(calls) == 1
    check(calls)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert streamed(client, **fields) == ("", calls, "tool_calls")
    for seed in range(2):
        check(calls_of(ask(client, temperature=1.5, seed=seed, **fields)))


def test_the_named_function_is_called_and_no_other(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice=NAMED)
    calls = calls_of(choice)
    assert [name for name, _ in calls] == ["add"]
    check(calls)
    assert (choice.finish_reason, choice.message.content) == ("stop", None)
    assert streamed(client, tool_choice=NAMED) == ("", calls, "stop")


def test_a_function_without_parameters_is_called_without(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    assert calls_of(ask(client, tools=tools, tool_choice=NAMED | {"function": {"name": "now"}})) == [("now", "{}")]


def test_several_calls_may_come_if_not_forbidden(client: openai.OpenAI) -> None:
    """The end-of-sequence token is made unlikely, so that the model goes on as long as it may."""
    tools = [{"type": "function", "function": {"name": "now"}}]
    unlikely = {str(token): -100 for token in range(8)}
    many = ask(client, tools=tools, tool_choice="required", logit_bias=unlikely)
    assert many.finish_reason == "length"
    assert len(calls_of(many)) > 1
    one = ask(client, tools=tools, tool_choice="required", logit_bias=unlikely, parallel_tool_calls=False)
    assert (one.finish_reason, calls_of(one)) == ("tool_calls", [("now", "{}")])


def test_a_cut_call_is_shown_as_far_as_it_came(client: openai.OpenAI) -> None:
    whole = calls_of(ask(client, tool_choice=NAMED))[0]
    seen = set()
    for length in range(12, 140, 16):
        choice = ask(client, tool_choice=NAMED, max_tokens=length)
        if choice.finish_reason == "stop":
            break
        assert choice.finish_reason == "length"
        assert choice.message.content in (None, "")
        for name, arguments in calls_of(choice):
            assert name == "add"
            assert whole[1].startswith(arguments)
            seen.add(arguments)
        assert streamed(client, tool_choice=NAMED, max_tokens=length)[1:] == (calls_of(choice), "length")
    assert len(seen) > 1


def test_calls_wait_for_the_end_of_reasoning_that_the_prompt_began(client: openai.OpenAI) -> None:
    """Nothing makes this model end it, so the length does: no call comes before."""
    extra = {"chat_template_kwargs": {"thinking": True}}
    choice = ask(client, tool_choice="required", max_tokens=20, extra_body=extra)
    assert choice.message.reasoning_content
    assert (choice.finish_reason, calls_of(choice)) == ("length", [])
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": NOW}}
    choice = ask(client, response_format=form, max_tokens=20, extra_body=extra)
    assert choice.message.reasoning_content
    assert choice.message.content == ""


def test_strict_functions_hold_where_the_model_chooses(client: openai.OpenAI) -> None:
    """Text stays free up to what begins a call, which a bias of the first token alone would not bring about."""
    strict = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
    free = ask(client, tool_choice="none")
    held = ask(client, tools=strict)
    assert (held.message.content, held.finish_reason) == (free.message.content, free.finish_reason)
