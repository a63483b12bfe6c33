"""Structured output, tool calls and cached prefixes over HTTP."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from sidestream.engine.llm import bundled_model
from tests.server.live_server import LiveServer, live_server

MODEL = "glm5-next-tiny"
PROMPT = "Question: What is 12 + 30?\nAnswer:"
CHAT: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "maximum": 999, "minimum": 0}},
    "required": ["sum"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = "<think>Hm</think><tool_call>add\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n</tool_call>"


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as made:
        yield made


def test_a_json_schema_is_followed(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, response_format=form)
    value = json.loads(answer.choices[0].message.content or "")
    assert set(value) == {"sum"}
    assert 0 <= value["sum"] <= 999
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[a-c]{4}"}, "[a-c]{4}"),
        ({"choice": ["left", "right"]}, "left|right"),
        ({"grammar": 'root ::= "<" ("x" | "y") ">"'}, "<[xy]>"),
        ({"json": SCHEMA}, r'\{\s*"sum"\s*:\s*[0-9]+\s*\}'),
    ],
)
def test_other_forms(client: openai.OpenAI, form: dict[str, Any], pattern: str) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=60, n=2, extra_body={"structured_outputs": form}
    )
    for choice in answer.choices:
        assert re.fullmatch(pattern, choice.text)
        assert choice.finish_reason == "stop"


def test_split_characters_are_streamed_whole(client: openai.OpenAI) -> None:
    """Each byte of these is a token of its own; what a client sees is never half a character."""
    extra = {"structured_outputs": {"regex": "é漢🙂!"}}
    stream = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=40, stream=True, logprobs=1, extra_body=extra
    )
    choices = [choice for chunk in stream for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == "é漢🙂!"
    assert all("\N{REPLACEMENT CHARACTER}" not in choice.text for choice in choices)
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens or ()]
    assert any(token.startswith("bytes:\\x") for token in tokens)
    assert not any("\N{REPLACEMENT CHARACTER}" in token for token in tokens)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"structured_outputs": {}}, "exactly one of"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "exactly one of"),
        ({"structured_outputs": {"regex": "("}}, "cannot be compiled"),
        ({"structured_outputs": {"json": {"type": "poem"}}}, "cannot be compiled"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, "give one of them"),
        ({"response_format": {"type": "json_schema"}}, "do not fit"),
        ({"response_format": {"type": "poem"}}, "response_format"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_bad_forms_are_refused(server: LiveServer, fields: dict[str, Any], says: str, stream: bool) -> None:
    status, answer = server.post("/v1/completions", {"prompt": PROMPT, "stream": stream, **fields})
    assert status == 400
    assert re.search(says, answer["error"]["message"])


def test_a_stream_beside_a_form_is_not_changed(server: LiveServer, client: openai.OpenAI) -> None:
    plain = {"prompt": PROMPT, "temperature": 0, "max_tokens": 30}
    alone = server.post("/v1/completions", plain)[1]["choices"][0]["text"]
    stream = client.completions.create(model=MODEL, stream=True, **plain)  # type: ignore[call-overload]
    text = next(iter(stream)).choices[0].text
    server.post("/v1/completions", plain | {"structured_outputs": {"regex": "[a-z]{9}"}})
    text += "".join(choice.text for chunk in stream for choice in chunk.choices)
    assert text == alone


def calling(fields: dict[str, Any]) -> dict[str, Any]:
    """A request whose answer is ``CALL``, whatever the model would say."""
    return {"messages": CHAT, "tools": [TOOL], "extra_body": {"structured_outputs": {"choice": [CALL]}}, **fields}


def test_tool_calls_and_reasoning_come_whole(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, **calling({"n": 2}))
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.reasoning_content == "Hm"  # type: ignore[attr-defined]
        (call,) = choice.message.tool_calls or ()
        assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "add", {"a": 12})
        assert call.id.startswith("call_")


def test_tool_calls_and_reasoning_come_streamed(client: openai.OpenAI) -> None:
    name, arguments, reasoning, reasons = "", "", "", []
    for chunk in client.chat.completions.create(model=MODEL, stream=True, **calling({})):
        (choice,) = chunk.choices
        assert not choice.delta.content
        reasoning += getattr(choice.delta, "reasoning_content", "") or ""
        for call in choice.delta.tool_calls or ():
            name += call.function.name or ""
            arguments += call.function.arguments or ""
        reasons.append(choice.finish_reason)
    assert (name, json.loads(arguments), reasoning) == ("add", {"a": 12}, "Hm")
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}


def test_without_tools_a_call_is_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, **calling({"tool_choice": "none"}))
    assert answer.choices[0].message.content == CALL.partition("</think>")[2]
    assert answer.choices[0].finish_reason == "stop"


def test_the_template_sees_tools_and_calls(tmp_path: Path) -> None:
    """A template that prints them: arguments are objects there, though clients send them as text."""
    folder = tmp_path / "model"
    shutil.copytree(bundled_model(), folder)
    (folder / "chat_template.jinja").write_text(
        "{%- for tool in tools or [] -%}[{{ tool.function.name }}]{%- endfor -%}"
        "{%- for m in messages -%}{{ m.role }}:{{ m.content }}"
        "{%- for call in m.tool_calls or [] -%}({{ call.function.arguments.a }}){%- endfor -%};{%- endfor -%}"
        "{%- if mood is defined -%}{{ mood }}{%- endif -%}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 12}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "z", "tool_call_id": "1"},
    ]
    with live_server(str(folder)) as server:
        server.await_ready()
        body = {"messages": messages, "tools": [TOOL], "chat_template_kwargs": {"mood": "!"}}
        tokens = server.post("/tokenize", body)[1]["tokens"]
        assert server.post("/detokenize", {"tokens": tokens})[1]["prompt"] == "[add]user:xy;assistant:(12);tool:z;!"
        call["function"]["arguments"] = "{broken"
        status, answer = server.post("/v1/chat/completions", body)
        assert (status, "not JSON" in answer["error"]["message"]) == (400, True)


def test_cached_prompts_are_reported(server: LiveServer) -> None:
    """The second time most of the prompt is there already; with another salt nothing is."""
    body = {"prompt": "The code of beaver is 4377. " * 40, "max_tokens": 2, "temperature": 0}
    first, second, other = (
        server.post("/v1/completions", body | salt)[1] for salt in ({}, {}, {"cache_salt": "another"})
    )
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert second["usage"]["prompt_tokens"] / 2 < cached < second["usage"]["prompt_tokens"]
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert server.metric("vllm:prefix_cache_hits_total") >= cached
    server.await_idle()
