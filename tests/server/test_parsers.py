"""Reasoning and tool calls of GLM and DeepSeek answers: the same however the text is cut."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.server.answer_pieces import CallArguments, CallStart, Content, Piece, Reasoning
from sidestream.server.argument_types import JsonText, json_types
from sidestream.server.parsers import opens_thinking, parser_for, parser_of
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


FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *(f"<{BAR}tool▁{name}{BAR}>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")),
    *(f"<{BAR}DSML{BAR}function_calls>", f"</{BAR}DSML{BAR}function_calls>", f"</{BAR}DSML{BAR}invoke>"),
    *(f'<{BAR}DSML{BAR}invoke name="', f'<{BAR}DSML{BAR}parameter name="', '" string="true">', '" string="false">'),
    *(f"</{BAR}DSML{BAR}parameter>", '">', "weather", "city", "days", "12", "true", '{"a": "\n"}', "[", '"', "\\"),
    *("<", f"<{BAR}", "</", " ", "\n", "é漢🙂", "x < y > z", "\t"),
]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=25),
    cuts=st.lists(st.integers(0, 200), max_size=12),
    thinking=st.booleans(),
)
def test_where_a_text_is_cut_changes_nothing(name: str, fragments: list[str], cuts: list[int], thinking: bool) -> None:
    """Tags in any order, whole or not, well formed or not: pieces make the message that the whole makes."""
    text = "".join(fragments)
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    whole, parts = (parser_for(name, thinking, TOOLS)() for _ in range(2))
    expected = collect(whole.push(text) + whole.finish())
    pieces: list[Piece] = []
    for begin, end in pairwise(bounds):
        pieces += parts.push(text[begin:end])
    assert collect(pieces + parts.finish()) == expected


@pytest.mark.parametrize("name", NAMES)
def test_text_around_and_between_calls_is_content(name: str) -> None:
    text = f"First.\n\n{CALLS[name]}\nThen <b>.\n{CALLS[name]}\n\n"
    _, content, calls = parse(name, text, tools=TOOLS)
    check(name, text, ("", content, calls), tools=TOOLS)
    assert content == "First.\nThen <b>."
    assert [called for called, _ in calls] == ["weather", "now"] * 2


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_without_an_end_is_all_there_is(name: str) -> None:
    check(name, f"so {CALLS[name]}", (f"so {CALLS[name]}", "", []), prompt="<think>", tools=TOOLS)
    check(name, "</think>", ("", "", []), prompt="<think>", tools=TOOLS)
    check(name, "a</think>b</think>", ("", "a</think>b</think>", []), tools=TOOLS)


def test_a_message_that_goes_on_says_whether_it_is_reasoning() -> None:
    assert opens_thinking("<|assistant|><think>\n")
    assert not opens_thinking("<|user|>what is <think> for?<|assistant|></think>")
    assert opens_thinking("<|assistant|><think>I am", continued="<think>I am")
    assert not opens_thinking("<|assistant|><think>I am</think>It", continued="<think>I am</think>It")


@pytest.mark.parametrize(
    "value",
    ["<b>1 < 2</b>", "</arg_key>", "<tool_call>x</tool_call>", "</arg_val", "a\n\n b ", "漢🙂", '"q" \\', "\x08"],
)
def test_text_arguments_keep_every_character(value: str) -> None:
    call = f"<tool_call>weather<arg_key>city</arg_key><arg_value>{value}</arg_value></tool_call>"
    _, _, ((_, arguments),) = parse("glm", call, tools=TOOLS)
    assert json.loads(arguments) == {"city": value}
    check("glm", call, ("", "", [("weather", arguments)]), tools=TOOLS)


def test_text_arguments_are_shown_as_they_come() -> None:
    parser = parser_for("glm", False, TOOLS)()
    assert collect(parser.push("<tool_call>weather<arg_key>city</arg_key><arg_value>New Y"))[2] == [
        ("weather", '{"city": "New Y')
    ]
    (piece,) = parser.push('ork "N')
    assert piece == CallArguments(0, 'ork \\"N')


@pytest.mark.parametrize("name", NAMES)
def test_no_part_of_a_tag_ends_cut_arguments(name: str) -> None:
    text = CALLS[name]
    whole = dict(parse(name, text, tools=TOOLS)[2])
    for length in range(len(text)):
        for end in ("", "\N{REPLACEMENT CHARACTER}" if text[length] == BAR else ""):  # cut within the character
            for called, arguments in parse(name, text[:length] + end, tools=TOOLS)[2]:
                assert whole[called].startswith(arguments), text[:length]


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("<arg_key>a</arg_key></tool_call>", {}),
        ("<arg_key>a</tool_call>", {}),
        ("<arg_key>a<arg_value>1</arg_value></tool_call>", {"a": 1}),
        ("<arg_key> a </arg_key> x <arg_value>1</arg_value> y </tool_call>", {"a": 1}),
    ],
)
def test_malformed_calls_swallow_nothing_behind_them(call: str, arguments: dict[str, int]) -> None:
    text = f"<tool_call>f{call}and <tool_call>now</tool_call>"
    _, content, calls = parse("glm", text, tools=TOOLS)
    assert (content, [name for name, _ in calls]) == ("and", ["f", "now"])
    assert json.loads(calls[0][1]) == arguments


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, "null", "null"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": "true"}, "true", "true"),
        ({"$ref": "#/$defs/Zip"}, "01234", "01234"),
        ({"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]}, "12", "12"),
        ({"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "null"]}, '"x"', '"x"'),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "integer"]}, "1.5", "1.5"),
        ({"type": ["string", "number"]}, "12", 12),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]}, "12", "12"),
        ({"type": "integer"}, " 3\n", 3),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "object"}, '{"a": "x\ny"}', {"a": "x\ny"}),
        ({"properties": {}}, "[1]", [1]),
        ({}, '"x"', "x"),
        ({}, "x", "x"),
        ({"$ref": "#/nowhere"}, "1", 1),
        ({"$ref": "#/properties/a"}, "1", 1),
    ],
)
def test_arguments_are_read_by_their_schema(schema: dict[str, object], text: str, expected: object) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": {"Zip": {"type": "string"}}}
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})
    call = f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
    _, _, ((_, arguments),) = parse("glm", call, tools=[tool])
    assert json.loads(arguments) == {"a": expected}


def test_numbers_keep_their_digits() -> None:
    """What a client would get from a float, or could not get at all from an integer of thousands of digits."""
    for value in ("1.10", "1e999", "9" * 5000, "-0"):
        call = f"<tool_call>weather<arg_key>days</arg_key><arg_value>{value}</arg_value></tool_call>"
        assert parse("glm", call, tools=TOOLS)[2] == [("weather", f'{{"days": {value}}}')]


def test_halves_of_surrogate_pairs_stay_escaped() -> None:
    """The text of an answer must be UTF-8."""
    call = '<tool_call>weather<arg_key>x</arg_key><arg_value>["\\ud800"]</arg_value></tool_call>'
    ((_, arguments),) = parse("glm", call, tools=TOOLS)[2]
    assert arguments.encode() == b'{"x": ["\\ud800"]}'


def test_types_of_a_schema_that_leads_to_itself() -> None:
    root = {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}}}
    assert "null" in json_types({"$ref": "#/$defs/A"}, root)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(value=st.recursive(st.text(max_size=6), lambda inner: st.lists(inner, max_size=3)), seed=st.integers(0, 99))
def test_control_characters_in_json_are_escaped_and_nothing_else(value: object, seed: int) -> None:
    proper = json.dumps(value, ensure_ascii=False, indent=1)
    assert _in_pieces(proper, seed) == proper
    raw = proper
    for character in ("\n", "\t", "\x08"):
        raw = raw.replace(f"\\u{ord(character):04x}", character)
    assert json.loads(_in_pieces(raw, seed)) == json.loads(proper)


def _in_pieces(text: str, seed: int) -> str:
    draws, json_text, out = random.Random(seed), JsonText(), ""
    while text:
        size = draws.randrange(1, 4)
        out += json_text.push(text[:size])
        text = text[size:]
    return out


def test_the_checkpoint_says_which_parser_it_needs() -> None:
    assert parser_of("glm5_next", "...<tool_call>...") == "glm"
    assert parser_of("deepseek_v32", None) == "deepseek_v32"
    assert parser_of("deepseek_v32", f"...'<{BAR}tool▁sep{BAR}>' + tool['function']['arguments']...") == "deepseek_v31"
    assert parser_of("kimi_linear", None) == "none"
