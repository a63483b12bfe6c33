"""Text of a given form: whatever the model would rather say, what comes out matches, and nothing else changes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sidestream import LLM, RequestError, SamplingParams
from sidestream.core.structured_outputs import StructuredOutputs
from tests.engine.llm_fixtures import make_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPT = "Question: What is 12 + 30?\nAnswer:"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu", max_num_seqs=4, max_num_batched_tokens=64)


def complete(llm: LLM, seed: int | None = None, max_tokens: int = 200, **form: object) -> tuple[str, str]:
    params = SamplingParams(
        temperature=0 if seed is None else 1.5,
        seed=seed,
        max_tokens=max_tokens,
        structured_outputs=StructuredOutputs(**form),  # type: ignore[arg-type]
    )
    (output,) = llm.generate(PROMPT, params)
    return output.outputs[0].text, str(output.outputs[0].finish_reason)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_json_follows_its_schema(llm: LLM, seed: int | None) -> None:
    text, reason = complete(llm, seed, json=SCHEMA)
    assert reason == "stop"
    value = json.loads(text)
    assert set(value) == {"name", "age"}
    assert isinstance(value["name"], str)
    assert 0 <= value["age"] <= 150


def test_characters_of_several_tokens_come_out_whole(llm: LLM) -> None:
    """The bytes of each are separate tokens here; none is shown before its character is complete."""
    form = StructuredOutputs(regex="é漢🙂 ok")
    pieces = [
        delta.text
        for delta in llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=40, structured_outputs=form))
    ]
    assert "".join(pieces) == "é漢🙂 ok"
    assert "" in pieces, "some tokens end within a character"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("seed", [None, 4])
def test_regex_grammar_and_choice(llm: LLM, seed: int | None) -> None:
    assert re.fullmatch(r"[a-c]{5}-[0-9]{3}", complete(llm, seed, regex="[a-c]{5}-[0-9]{3}")[0])
    assert complete(llm, seed, choice=["yes", 'no "quoted"\n'])[0] in ("yes", 'no "quoted"\n')
    grammar = 'root ::= "(" inner ")"\ninner ::= "x" | "y" "y" | "z"'
    assert complete(llm, seed, grammar=grammar)[0] in ("(x)", "(yy)", "(z)")
    assert complete(llm, seed, json_object=True)[0].startswith("{")


def test_the_length_ends_an_unfinished_form(llm: LLM) -> None:
    text, reason = complete(llm, max_tokens=5, regex="[0-9]{50}")
    assert reason == "length"
    assert re.fullmatch("[0-9]+", text)


def test_a_form_that_nothing_can_follow_ends(llm: LLM) -> None:
    """The second rule derives no text at all: after the first, only the end is left."""
    grammar = 'root ::= "ab" dead\ndead ::= "c" dead'
    text, reason = complete(llm, max_tokens=30, grammar=grammar)
    assert text.startswith("ab")
    assert reason in ("length", "stop")


def test_a_structural_tag_holds_its_parts(llm: LLM) -> None:
    number = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 10, "maximum": 99}}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<n>", "content": number, "end": "</n>"}}
    text, reason = complete(llm, structural_tag=tag)
    assert (reason, bool(re.fullmatch("<n>[0-9]{2}</n>", text))) == ("stop", True)


def test_properties_keep_the_order_of_their_schema(llm: LLM) -> None:
    """What is to be thought of first stands first, whatever its name."""
    properties = {name: {"type": "boolean"} for name in ("why", "answer", "zeal")}
    text, _ = complete(llm, json={"type": "object", "properties": properties, "required": list(properties)})
    assert list(json.loads(text)) == ["why", "answer", "zeal"]


def test_strings_of_limited_length_hold_no_control_characters(llm: LLM) -> None:
    """xgrammar allows them there, and they are no JSON; a bias makes a model that writes nothing else."""
    tokens = {llm.tokenizer.decode([token]): token for token in range(len(llm.tokenizer))}
    wanted = {tokens[character]: 100.0 for character in ("\t", "\x08", "\r")}
    for control_characters in (True, False):
        form = StructuredOutputs(
            structural_tag={"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SHORT}},
            control_characters=control_characters,
        )
        assert _controls(llm, form, wanted) is control_characters
    assert not _controls(llm, StructuredOutputs(json=SHORT), wanted)


SHORT = {"type": "string", "minLength": 3, "maxLength": 4}


def _controls(llm: LLM, form: StructuredOutputs, bias: dict[int, float]) -> bool:
    params = SamplingParams(temperature=0, max_tokens=30, structured_outputs=form, logit_bias=bias)
    text = llm.generate(PROMPT, params)[0].outputs[0].text
    assert len(text) > 4
    return any(character < " " and character != "\n" for character in text)


def test_neighbours_in_the_batch_are_not_touched(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=30)
    tied = SamplingParams(temperature=0, max_tokens=30, structured_outputs=StructuredOutputs(regex="[x-z]{20}"))
    alone = llm.generate(PROMPT, free)[0].outputs[0].text
    outputs = llm.generate([PROMPT] * 4, [free, tied, free, tied])
    assert [output.outputs[0].text for output in outputs[::2]] == [alone, alone]
    assert all(re.fullmatch("[x-z]{20}", output.outputs[0].text) for output in outputs[1::2])


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({}, "exactly one of"),
        ({"regex": "a", "json": "{}"}, "exactly one of"),
        ({"regex": 5}, "regex is int"),
        ({"choice": []}, "choice"),
        ({"choice": "abc"}, "choice"),
        ({"regex": "a" * 70000}, "70000 characters"),
        ({"json": {"type": {1, 2}}}, "not a JSON schema"),
        ({"structural_tag": "a" * (2**20 + 1)}, "limit is 1048576"),
        ({"source": "tools"}, "^tools needs exactly one of"),
    ],
)
def test_forms_are_checked(form: dict[str, object], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        StructuredOutputs(**form)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(unclosed"},
        {"json": "{not json"},
        {"json": '{"type": "poem"}'},
        {"grammar": "root = x"},
        {"structural_tag": "{}"},
    ],
)
def test_what_cannot_be_compiled_is_refused_and_leaves_nothing(llm: LLM, form: dict[str, str]) -> None:
    with pytest.raises(RequestError, match=r"^structured_outputs cannot be compiled: (?!\[)"):
        complete(llm, **form)
    with pytest.raises(RequestError, match=r"^tools cannot be compiled"):
        complete(llm, source="tools", **form)
    assert not llm.core.has_work()
    llm.core.scheduler.check_integrity()


@pytest.mark.parametrize("other", [{"min_tokens": 3}, {"ignore_eos": True}])
def test_what_contradicts_a_form_is_refused(llm: LLM, other: dict[str, object]) -> None:
    params = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputs(regex="a"), **other)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=next(iter(other))):
        llm.generate(PROMPT, params)


def test_a_checkpoint_without_a_tokenizer_refuses(tmp_path: Path) -> None:
    make_checkpoint("next", tmp_path)
    llm = LLM(tmp_path, device="cpu", dtype="float32", max_model_len=64)
    with pytest.raises(RequestError, match="needs a tokenizer"):
        llm.generate([[1, 2]], SamplingParams(structured_outputs=StructuredOutputs(regex="a")))


def test_a_step_that_runs_ahead_waits_for_the_token(tmp_path: Path) -> None:
    """On a device beside the host the next step is planned before the token is known, but not for these."""
    make_checkpoint("next", tmp_path, tokenizer=True)
    plain = LLM(tmp_path, device="cpu", dtype="float32", max_model_len=64, max_num_seqs=2, block_size=8)
    ahead = LLM(tmp_path, device="sim", max_model_len=64, max_num_seqs=2, block_size=8, max_num_batched_tokens=16)
    texts = [complete(llm, max_tokens=12, regex="[0-9]{3}[a-z]{4}")[0] for llm in (plain, ahead)]
    assert texts[0] == texts[1]
    assert re.fullmatch("[0-9]{3}[a-z]{4}", texts[0])
    assert ahead.core.waits["what may follow depends on the tokens so far"] > 0
