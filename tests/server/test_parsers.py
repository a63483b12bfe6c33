"""Reasoning and tool calls of GLM and DeepSeek answers: the same however the text is cut."""

from __future__ import annotations

import json
import random

import pytest

from sidestream.server.answer_pieces import CallArguments, CallStart, Content, Piece, Reasoning
from sidestream.server.parsers import opens_thinking, parser_for
from sidestream.server.protocol import Tool

WEATHER = Tool.model_validate(
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
)
NOW = Tool.model_validate({"type": "function", "function": {"name": "now"}})
TOOLS = [WEATHER, NOW]

GLM_CALLS = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>"
)
V31_CALLS = (
    '<|tool▁calls▁begin|><|tool▁call▁begin|>weather<|tool▁sep|>{"city": "12", "days": 3}<|tool▁call▁end|>'
    "<|tool▁call▁begin|>now<|tool▁sep|>{}<|tool▁call▁end|><|tool▁calls▁end|>"
)
V32_CALLS = (
    '<|DSML|function_calls>\n<|DSML|invoke name="weather">\n'
    '<|DSML|parameter name="city" string="true">12</|DSML|parameter>\n'
    '<|DSML|parameter name="days" string="false">3</|DSML|parameter>\n</|DSML|invoke>\n'
    '<|DSML|invoke name="now">\n</|DSML|invoke>\n</|DSML|function_calls>'
)
BAR = "\N{FULLWIDTH VERTICAL LINE}"
CALLS = {
    "glm": GLM_CALLS,
    "deepseek_v31": V31_CALLS.replace("|", BAR),
    "deepseek_v32": V32_CALLS.replace("|", BAR),
}
NAMES = sorted(CALLS)

Parts = tuple[str, str, list[tuple[str, str]]]


def collect(pieces: list[Piece]) -> Parts:
    """Reasoning, content, and calls as (name, arguments)."""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.index == len(calls)
            calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            name, arguments = calls[piece.index]
            calls[piece.index] = (name, arguments + piece.text)
    return (
        "".join(p.text for p in pieces if isinstance(p, Reasoning)),
        "".join(p.text for p in pieces if isinstance(p, Content)),
        calls,
    )


def parse(name: str, text: str, *, prompt: str = "", tools: list[Tool] | None = None, seed: int | None = None) -> Parts:
    """The parts of a text that comes whole, or cut at random places."""
    parser = parser_for(name, opens_thinking(prompt), tools)()
    pieces: list[Piece] = []
    draws = random.Random(seed)
    while text:
        size = len(text) if seed is None else draws.randrange(1, 6)
        pieces += parser.push(text[:size])
        text = text[size:]
    return collect(pieces + parser.finish())


def check(name: str, text: str, expected: Parts, **options: object) -> None:
    assert parse(name, text, **options) == expected  # type: ignore[arg-type]
    for seed in range(20):
        assert parse(name, text, seed=seed, **options) == expected, f"cut with seed {seed}"  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_text_and_calls(name: str) -> None:
    text = f"<think>\nLet me see: 1 < 2</think>\n\nI will look.\n{CALLS[name]}"
    parser_calls = [("weather", '{"city": "12", "days": 3}'), ("now", "{}")]
    check(name, text, ("Let me see: 1 < 2", "I will look.", parser_calls), tools=TOOLS)
    for _, arguments in parser_calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_that_ends_with_the_tag_begins_with_reasoning(name: str) -> None:
    check(name, "so\n it is</think>Yes.", ("so\n it is", "Yes.", []), prompt="<|assistant|><think>\n")
    check(name, "Yes.", ("", "Yes.", []), prompt="<|assistant|></think>")


@pytest.mark.parametrize("name", NAMES)
def test_without_tools_calls_are_text(name: str) -> None:
    check(name, f"See: {CALLS[name]}", ("", f"See: {CALLS[name]}", []))


@pytest.mark.parametrize("name", [*NAMES, "none"])
@pytest.mark.parametrize(
    "text", ["plain", " after space", "\n ", "a < b", "5 <thin", "x\n\n", "<tool", f"é <{BAR}DS", ""]
)
def test_plain_text_stays_as_it_is(name: str, text: str) -> None:
    check(name, text, ("", text, []), tools=TOOLS)


@pytest.mark.parametrize("name", NAMES)
def test_text_is_shown_as_soon_as_it_cannot_be_a_tag(name: str) -> None:
    parser = parser_for(name, False, TOOLS)()
    assert collect(parser.push("Hello the"))[1] == "Hello the"
    assert collect(parser.push("re <"))[1] == "re"
    assert collect(parser.push("b"))[1] == " <b"


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_off_answer_is_a_beginning(name: str) -> None:
    """A length limit can end an answer anywhere: never an error, and what is given is a prefix of the whole."""
    text = f"<think>Hm.</think>Now.{CALLS[name]}"
    reasoning, content, calls = parse(name, text, tools=TOOLS)
    for length in range(len("<think>"), len(text)):
        cut_reasoning, cut_content, cut_calls = parse(name, text[:length], tools=TOOLS)
        within = text[:length].rpartition("<")[2]  # what may be the beginning of a tag is text if nothing follows
        assert reasoning.startswith(cut_reasoning.removesuffix("<" + within))
        assert content.startswith(cut_content.removesuffix("<" + within).rstrip())
        assert len(cut_calls) <= len(calls)
        for (cut_name, cut_arguments), (whole_name, whole_arguments) in zip(cut_calls, calls, strict=False):
            assert whole_name == cut_name
            assert whole_arguments.startswith(cut_arguments.removesuffix("<" + within))


def test_values_follow_the_parameters_type() -> None:
    call = "<tool_call>weather<arg_key>{}</arg_key><arg_value>{}</arg_value></tool_call>"
    for key, value, expected in (
        ("city", "12", "12"),
        ("city", '"x"', '"x"'),
        ("days", "12", 12),
        ("days", "many", "many"),
        ("other", '{"a": [1, 2]}', {"a": [1, 2]}),
        ("other", "NaN", "NaN"),
        ("city", 'with "quotes"\nand a line', 'with "quotes"\nand a line'),
    ):
        _, _, ((_, arguments),) = parse("glm", call.format(key, value), tools=TOOLS)
        assert json.loads(arguments) == {key: expected}
