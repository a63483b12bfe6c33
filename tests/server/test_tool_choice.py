"""Calls that must come: whatever a model without any idea of the format would say, ``openai`` gets valid calls."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from sidestream.core.sampling_params import SamplingParams
from sidestream.core.structured_outputs import StructuredOutputs
from sidestream.engine.llm import bundled_model
from sidestream.engine.tokenizer import load_tokenizer
from sidestream.errors import RequestError
from sidestream.server.call_forms import FORMS
from sidestream.server.protocol import ChatRequest
from sidestream.server.tool_choice import ToolChoice, constrain
from sidestream.server.tool_schemas import Totals
from tests.engine.tiny_tokenizers import byte_fallback
from tests.server.drawer import Drawer
from tests.server.live_server import LiveServer, live_server

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
    ((name, arguments),) = calls_of(ask(client, tools=tools, tool_choice=NAMED | {"function": {"name": "now"}}))
    assert (name, json.loads(arguments)) == ("now", {})


def test_several_calls_may_come_if_not_forbidden(client: openai.OpenAI) -> None:
    """What would end the calls is made unlikely, so that the model goes on as long as it may."""
    tools = [{"type": "function", "function": {"name": "now"}}]
    tokenizer: Any = load_tokenizer(bundled_model())
    texts = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
    ends = {token for token, text in texts.items() if "s" in text or "/" in text or token in tokenizer.all_special_ids}
    fields: dict[str, Any] = {"tools": tools, "tool_choice": "required", "logit_bias": {str(end): -100 for end in ends}}
    many = ask(client, max_tokens=150, **fields)
    assert many.finish_reason == "length"
    assert len(calls_of(many)) > 1
    one = ask(client, parallel_tool_calls=False, **fields)
    assert (one.finish_reason, len(calls_of(one))) == ("tool_calls", 1)


def test_a_cut_call_is_shown_as_far_as_it_came(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": CHAT, "tools": TOOLS, "temperature": 0}
    answer = client.chat.completions.create(tool_choice=NAMED, **body)
    whole, count = calls_of(answer.choices[0])[0], answer.usage.completion_tokens if answer.usage else 0
    seen = set()
    for length in (6, count // 2, count * 3 // 4, count - 2):
        choice = ask(client, tool_choice=NAMED, max_tokens=length)
        assert choice.finish_reason == "length"
        assert choice.message.content in (None, "")  # the beginning of a call is no text
        for name, arguments in calls_of(choice):
            assert name == "add"
            assert whole[1].startswith(arguments)
            seen.add(arguments)
    assert len(seen) > 1
    assert streamed(client, tool_choice=NAMED, max_tokens=count - 2) == ("", calls_of(choice), "length")


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


def test_strict_calls_that_the_model_begins_are_held_to_their_schema(tmp_path: Path) -> None:
    """A special token spells the opening here, as in real checkpoints, and a bias lets the model begin with it."""
    folder = tmp_path / MODEL
    shutil.copytree(bundled_model(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((folder / name).read_text().replace("<|system|>", "<tool_call>"))
    opening = load_tokenizer(folder).convert_tokens_to_ids("<tool_call>")  # type: ignore[union-attr]
    with live_server(str(folder), "--served-model-name", MODEL) as server:
        server.await_ready()
        with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
            fields: dict[str, Any] = {"tools": strict(), "parallel_tool_calls": False}
            fields["logit_bias"] = {str(opening): 100}
            choice = ask(client, **fields)
            check(calls_of(choice))
            assert len(calls_of(choice)) == 1
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            assert streamed(client, **fields) == ("", calls_of(choice), "tool_calls")


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_a_template_without_reasoning_has_calls_from_the_first_token(
    server: LiveServer, choice: Any, reason: str
) -> None:
    """The bundled model's: free to reason first it would do so to the end of its length, and never call."""
    fields = {"tool_choice": choice, "parallel_tool_calls": False}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        answer = ask(client, model="glm5-next-tiny", **fields)
    assert (answer.finish_reason, len(calls_of(answer))) == (reason, 1)
    check(calls_of(answer))
    assert not getattr(answer.message, "reasoning_content", None)


@pytest.mark.parametrize("template", ["{{ '<think>' }}", "{{ m.split('</think>')[1] }}", "plain"])
def test_a_model_may_reason_first_where_its_template_knows_how(template: str) -> None:
    drawer, tokenizer = Drawer(), spelling()
    tokenizer.chat_template = template
    now = [{"type": "function", "function": {"name": "now", "parameters": NOW}}]
    choice = choose(tools=now, tool_choice="required", parallel_tool_calls=False)
    block = drawer.draw(FORMS["glm"].block([FORMS["glm"].call("now", NOW, Totals())], parallel=False), 0)
    for thinking, before, may in ((False, "<think>so</think>", template != "plain"), (True, "so</think>", True)):
        outputs = held(tokenizer, choice, SamplingParams(), thinking=thinking).structured_outputs
        assert outputs is not None
        form = json.loads(str(outputs.structural_tag))["format"]
        assert drawer.accepts(form, before + block) is may
        assert drawer.accepts(form, block) is not thinking


FUNCTION = TOOLS[0]["function"]
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "required"}, "tool_choice", "tool_choice is 'required', which needs tools"),
    ({"tool_choice": NAMED}, "tool_choice", "which needs tools"),
    ({"tool_choice": "any", "tools": TOOLS}, "tool_choice", "'any'"),
    ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice.function", "is missing"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": TOOLS},
        "tool_choice",
        "tool_choice names the function 'sub', tools has ",
    ),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "which needs tools"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "tools holds two functions of the name 'add'"),
    ({"tools": TOOLS, "tool_choice": "required", "min_tokens": 3}, "min_tokens", "which tools cannot have"),
    ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "which tools cannot have"),
    (
        {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
        "tools",
        "contradict structured_outputs",
    ),
]
BAD_PARAMETERS: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "array"}, "tools.0.function.parameters", "are of type array, they must be an object"),
    ({"type": "object", "properties": {"a": {"type": "poem"}}}, "tools", "have type 'poem', which must be one"),
    ({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}, "tools", "cannot be compiled: "),
    ({"type": "object", "properties": {"a": {"type": "array", "items": 5}}}, "tools", "have items 5, which must be a"),
    ({"type": "object", "properties": {"a": {"type": [["string"]]}}}, "tools", "which must be one or more of array"),
    ({"$ref": "#/$defs/t", "$defs": {"t": {"anyOf": [{"$ref": "#/$defs/t"}]}}}, "tools", "that lead to themselves"),
    ({"type": "object", "properties": {"a<b": {}}}, "tools", "'a<b', a name that a call cannot spell"),
]


@pytest.mark.parametrize("stream", [True, False])
def test_what_cannot_be_held_to_is_refused_with_the_field_at_fault(server: LiveServer, stream: bool) -> None:
    bad = [*BAD]
    for parameters, param, says in BAD_PARAMETERS:
        for held in ({"tool_choice": "required"}, {"strict": True}):
            function = FUNCTION | {"parameters": parameters, "strict": held.get("strict")}
            fields = {"tools": [{"type": "function", "function": function}], "tool_choice": held.get("tool_choice")}
            bad.append((fields, param, says))
    for fields, param, says in bad:
        status, answer = server.post("/v1/chat/completions", {"messages": CHAT, "stream": stream, **fields})
        assert status == 400, answer
        assert says in answer["error"]["message"]
        assert answer["error"]["param"] == param, answer
    server.await_idle()


def choose(parser: str = "glm", **fields: Any) -> ToolChoice:
    return ToolChoice(ChatRequest.model_validate({"messages": CHAT, "tools": TOOLS, **fields}), parser)


def strict(**fields: Any) -> list[Any]:
    return [{"type": "function", "function": FUNCTION | {"strict": True} | fields}]


def test_an_empty_list_of_tools_is_none() -> None:
    assert choose(tools=[]).tools is None
    assert not choose(tools=[], tool_choice="auto", parallel_tool_calls=False).strict


def test_a_server_without_a_parser_refuses_what_it_cannot_hold_to() -> None:
    for fields in ({"tool_choice": "required"}, {"tool_choice": NAMED}, {"tools": strict()}):
        with pytest.raises(RequestError, match=r"^tool.*needs an answer parser, and this server has none"):
            choose("none", **fields)
    for fields in ({}, {"tool_choice": "none", "tools": strict()}, {"parallel_tool_calls": False}):
        assert not choose("none", **fields).strict


def test_names_that_would_be_taken_for_tags_are_refused() -> None:
    with pytest.raises(RequestError, match=r"^tools\.0\.function\.name is 'a<b', which a call cannot spell"):
        choose(tools=strict(name="a<b"))
    assert not choose(tools=[{"type": "function", "function": {"name": "a<b"}}]).strict


def spelling(*special: str) -> Any:
    """A tokenizer of the bundled model's with some special tokens."""
    tokenizer: Any = load_tokenizer(bundled_model())
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def held(
    tokenizer: Any, choice: ToolChoice, params: SamplingParams, parser: str = "glm", **ends: Any
) -> SamplingParams:
    return constrain(params, choice, parser=parser, tokenizer=tokenizer, **{"prompt": "", "thinking": False} | ends)


def test_special_tokens_that_are_tags_stay_in_the_text() -> None:
    """Or the parser would never see them."""
    auto, params = choose(), SamplingParams()
    assert held(spelling(), auto, params).skip_special_tokens
    for tag in ("<tool_call>", "</think>"):
        assert not held(spelling(tag), auto, params).skip_special_tokens
    assert held(spelling("<tool_call>"), auto, params, parser="none").skip_special_tokens
    opening = "<\N{FULLWIDTH VERTICAL LINE}tool▁calls▁begin\N{FULLWIDTH VERTICAL LINE}>"
    assert not held(spelling(opening), auto, params, parser="deepseek_v31").skip_special_tokens


def test_a_tokenizer_that_cannot_spell_the_tags_is_refused() -> None:
    vocab = Tokenizer(WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    poor = PreTrainedTokenizerFast(tokenizer_object=vocab, unk_token="<unk>")
    with pytest.raises(
        RequestError, match=r"^tools of the format 'glm' begin with '<tool_call>', which .* cannot spell"
    ):
        held(poor, choose(tool_choice="required"), SamplingParams())
    bytewise = byte_fallback()  # which has "<" as a byte alone
    assert held(bytewise, choose(tool_choice="required"), SamplingParams()).structured_outputs is not None


def test_forms_wait_for_the_end_of_reasoning() -> None:
    """As the parser does, which takes all up to there for reasoning; nothing changes where none has begun."""
    for form in (
        StructuredOutputs(json={"type": "integer"}),
        StructuredOutputs(json_object=True),
        StructuredOutputs(regex="a+"),
        StructuredOutputs(grammar='root ::= "a"'),
        StructuredOutputs(choice=["a", "b"]),
    ):
        params = SamplingParams(structured_outputs=form)
        assert held(spelling(), choose(), params).structured_outputs == form
        behind = held(spelling(), choose(), params, thinking=True).structured_outputs
        assert behind is not None
        assert behind.control_characters == form.control_characters
        first, *_ = json.loads(str(behind.structural_tag))["format"]["elements"]
        assert first["end"] == "</think>"
        assert held(spelling(), choose("none"), params, parser="none", thinking=True).structured_outputs == form
    with pytest.raises(RequestError, match=r"^structured_outputs json is not a JSON schema"):
        held(spelling(), choose(), SamplingParams(structured_outputs=StructuredOutputs(json="{")), thinking=True)


@pytest.mark.parametrize("parser", ["glm", "deepseek_v31", "deepseek_v32"])
@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_is_a_call_or_has_the_form_asked_for(parser: str, thinking: bool) -> None:
    """``response_format`` says what content looks like, and calls are none."""
    drawer, params = Drawer(), SamplingParams(structured_outputs=StructuredOutputs(json={"type": "boolean"}))
    json_only: Any = {"type": "json_schema", "json_schema": {"name": "b", "schema": {"type": "boolean"}}}
    now = {"type": "function", "function": {"name": "now", "parameters": NOW}}
    block = drawer.draw(FORMS[parser].block([FORMS[parser].call("now", NOW, Totals())], parallel=False), 0)
    for tools in ([now], [now | {"function": now["function"] | {"strict": True}}]):  # type: ignore[operator]
        for choice, of_json, of_call in (("auto", True, True), ("required", False, True)):
            chosen = choose(parser, tools=tools, tool_choice=choice, response_format=json_only)
            prompt = "<think>" if thinking else "</think>"
            outputs = held(
                drawer.tokenizer, chosen, params, parser, prompt=prompt, thinking=thinking
            ).structured_outputs
            assert outputs is not None
            form = json.loads(str(outputs.structural_tag))["format"]
            before = "so</think>" if thinking else ""
            assert drawer.accepts(form, f"{before}true") is of_json
            assert drawer.accepts(form, before + block) is of_call
            assert not drawer.accepts(form, f"{before}text")
    assert not choose(parser, response_format={"type": "text"}).strict
    assert not choose(parser, structured_outputs={"regex": "a"}, parallel_tool_calls=False).strict
