"""Conversations as prompts: what clients send, as the templates of the families expect it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sidestream.engine.llm import bundled_model
from sidestream.engine.tokenizer import load_tokenizer
from sidestream.errors import RequestError
from sidestream.server.chat_prompt import tokenize_chat
from sidestream.server.protocol import Message, Tool

GLM = (
    "{%- if tools %}<|system|># Tools\n{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}\n{% endfor %}"
    "{%- endif -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'user' %}<|user|>{{ m.content }}"
    "{%- elif m.role == 'assistant' %}<|assistant|>"
    "{%- if m.reasoning_content is string %}<think>{{ m.reasoning_content }}</think>"
    "{%- else %}</think>{% endif %}{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name }}"
    "{%- for k, v in call.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>"
    "{{ v if v is string else v | tojson(ensure_ascii=False) }}</arg_value>{% endfor %}</tool_call>{% endfor %}"
    "{%- elif m.role == 'tool' %}<|observation|><tool_response>{{ m.content }}</tool_response>{% endif %}"
    "{%- endfor -%}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
"""The form of GLM-4.7's and later ones."""
DEEPSEEK_V31 = (
    "{%- for m in messages -%}{{ m['content'] }}{%- for tool in m['tool_calls'] or [] -%}"
    "{{ '<call>' + tool['function']['name'] + '<sep>' + tool['function']['arguments'] + '<end>' }}"
    "{%- endfor -%}{%- endfor -%}"
)
"""Joins names and arguments as text."""

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": ["string", "null"], "default": None}}},
    },
}


def call(arguments: Any, name: str = "weather") -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def render(template: str | None, messages: list[Any], **options: Any) -> str:
    tokenizer: Any = load_tokenizer(bundled_model())
    if template is not None:
        tokenizer.chat_template = template
    made = [Message.model_validate(message) for message in messages]
    tools = [Tool.model_validate(tool) for tool in options.pop("tools", ())]
    text, token_ids = tokenize_chat(tokenizer, made, tools=tools, **options)
    assert tokenizer.decode(token_ids) == text
    return text


ASKED = {"role": "user", "content": [{"type": "text", "text": "Rain in "}, {"type": "text", "text": "Köln?"}]}
CALLED = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "Look.",
    "tool_calls": [call('{"city": "Köln", "days": 2, "at": {"x": null}}'), call("", name="now")],
}
TOLD = {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": [{"type": "text", "text": "Rain."}]}


def test_a_tool_conversation_in_the_format_of_glm() -> None:
    text = render(GLM, [ASKED, CALLED, TOLD, {"role": "assistant", "content": "Yes."}, ASKED], tools=[TOOL])
    assert text == (
        '<|system|># Tools\n{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", '
        '"properties": {"city": {"type": ["string", "null"], "default": null}}}, "strict": true}}\n'
        "<|user|>Rain in Köln?<|assistant|><think>Look.</think>"
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value><arg_key>days</arg_key>"
        '<arg_value>2</arg_value><arg_key>at</arg_key><arg_value>{"x": null}</arg_value></tool_call>'
        "<tool_call>now</tool_call><|observation|><tool_response>Rain.</tool_response>"
        "<|assistant|></think>Yes.<|user|>Rain in Köln?<|assistant|><think>"
    )


def test_an_answer_sent_back_is_read() -> None:
    """As OpenAI's client holds it, and with the reasoning under either name."""
    nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))
    for given in ({"reasoning": "Look."}, {"reasoning_content": "Look.", "reasoning": "other"}):
        text = render(GLM, [ASKED, {"role": "assistant", "content": "Yes.", **nulls, **given}])
        assert "<think>Look.</think>Yes." in text


def test_a_tool_conversation_in_the_bundled_template() -> None:
    text = render(None, [ASKED, CALLED, TOLD, ASKED], tools=[TOOL])
    assert text == ("<|user|>\nRain in Köln?<|assistant|> <|end|><|user|>\nRain.<|user|>\nRain in Köln?<|assistant|>")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [('{"a":1}', '{"a":1}'), ({"a": "é"}, '{"a": "é"}'), ("", "{}"), (" ", "{}"), (None, "{}"), ({}, "{}")],
)
def test_templates_that_join_arguments_get_text(arguments: Any, shown: str) -> None:
    message = {"role": "assistant", "tool_calls": [call(arguments)]}
    assert render(DEEPSEEK_V31, [message]) == f"<call>weather<sep>{shown}<end>"
    assert render("{{ messages[0].tool_calls[0].function.arguments ~ '.' }}", [message]) == f"{shown}."


@pytest.mark.parametrize(
    ("tool_call", "says"),
    [
        (call("{broken"), r"messages\.0\.tool_calls\.0\.function\.arguments are not JSON: '{broken'"),
        (call("[1]"), r"messages\.0\.tool_calls\.0\.function\.arguments must be an object as JSON, got '\[1\]'"),
        (call("[" * 100_000), r"messages\.0\.tool_calls\.0\.function\.arguments are not JSON"),
        ({"id": "x", "type": "function"}, r"messages\.0\.tool_calls\.0 must hold a function with a name"),
        ({"function": {"arguments": "{}"}}, r"messages\.0\.tool_calls\.0 must hold a function with a name"),
    ],
)
def test_calls_that_no_template_could_show_are_refused(tool_call: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        render(GLM, [{"role": "assistant", "content": None, "tool_calls": [tool_call]}])


def test_a_message_needs_content_or_calls() -> None:
    for message in ({"role": "user"}, {"role": "assistant", "content": None, "tool_calls": []}):
        with pytest.raises(RequestError, match=r"messages\.1: a message needs content, or tool_calls"):
            render(GLM, [ASKED, message])


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_other_parts_than_text_are_refused_by_name(kind: str) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "x"}}]
    with pytest.raises(ValidationError, match=f"holds a part of type '{kind}'; this model reads text only"):
        Message.model_validate({"role": "user", "content": parts})


def test_the_last_message_can_go_on() -> None:
    begun = [ASKED, {"role": "assistant", "content": "It will "}]
    assert render(GLM, begun).endswith("It will <|assistant|><think>")
    assert render(GLM, begun, add_generation_prompt=False).endswith("</think>It will ")
    text = render(GLM, begun, continue_final_message=True)
    assert text.endswith("</think>It will ")
    assert render(GLM, begun, continue_final_message=True, add_generation_prompt=False) == text
    assert render(GLM, begun, continue_final_message=False).endswith("<think>")
    with pytest.raises(RequestError, match="add_generation_prompt and continue_final_message are true"):
        render(GLM, begun, continue_final_message=True, add_generation_prompt=True)


def test_what_the_template_refuses_is_said_in_one_line() -> None:
    with pytest.raises(RequestError, match=r"messages are refused by the checkpoint's chat template: roles first"):
        render("{{ raise_exception('roles first\\nand more') }}", [ASKED])
    with pytest.raises(RequestError, match="chat_template_kwargs holds 'continue_final_message'"):
        render(GLM, [ASKED], kwargs={"continue_final_message": True})
