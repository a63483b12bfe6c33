"""``sidestream generate`` as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sidestream import LLM, SamplingParams
from sidestream.cli.main import app
from tests.engine.llm_fixtures import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli")
    make_checkpoint("kimi", path, tokenizer=True)
    return path


def run(*args: str, stdin: str | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sidestream.cli.main", *args]
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result


def read_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def expected_text(folder: Path, prompt: str, max_tokens: int) -> str:
    llm = LLM(folder, device="cpu", max_model_len=128)
    return llm.generate(prompt, SamplingParams(temperature=0, max_tokens=max_tokens))[0].outputs[0].text


def test_a_prompt_streams_its_text(folder: Path) -> None:
    args = ("--model", str(folder), "--max-tokens", "12", "--max-model-len", "128")
    result = run("generate", "hello", *args)
    assert result.stdout == expected_text(folder, "hello", 12) + "\n"
    assert "tokens/s" in result.stderr
    assert run("generate", "-", *args, stdin="hello").stdout == result.stdout


def test_json_lines_in_and_out(folder: Path, tmp_path: Path) -> None:
    prompts = [
        {"prompt": "hello", "id": "a", "max_tokens": 5},
        {"prompt_token_ids": [5, 6, 7], "logprobs": 1},
        {"prompt": "hello", "temperature": 0.7, "seed": 4, "n": 2},
    ]
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(prompt) for prompt in prompts) + "\n\n")
    args = ["-m", str(folder), "--max-tokens", "9", "--max-model-len", "128", "--ignore-eos"]
    result = run("generate", "--input", str(source), "--output", str(sink), *args)
    assert result.stdout == ""
    lines = {line["index"]: line for line in read_lines(sink.read_text())}
    assert sorted(lines) == [0, 1, 2]
    assert lines[0]["id"] == "a"
    assert len(lines[0]["outputs"][0]["token_ids"]) == 5
    assert len(lines[1]["outputs"][0]["logprobs"]) == 9
    assert len(lines[2]["outputs"]) == 2
    again = run("generate", "--input", str(source), *args)
    assert {line["index"]: line for line in read_lines(again.stdout)} == lines


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 must be an object"),
        ('{"text": "a"}', "one of prompt"),
        ('{"prompt": "a", "top_p": 7}', "prompt 0: top_p is 7"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "'x', which is not a token id"),
        ('{"prompt": "a", "outputs": 1}', "outputs, which the answer needs"),
        ('{"prompt": "a", "max_token": 1}', "is 'max_tokens' meant?"),
        ('{"prompt": "a\\ud800"}', "surrogate pair"),
        ("[" * 100_000, "is not JSON"),
        ('{"prompt_token_ids": [' + "9" * 5000 + "]}", "is not JSON"),
        ('{"prompt": "a"}\n{"prompt": ""}', "prompt 1: the prompt is an empty string"),
        ("", "holds no prompts"),
    ],
)
def test_bad_files_are_refused_in_one_line(folder: Path, tmp_path: Path, line: str, message: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(line)
    sink = tmp_path / "answers.jsonl"
    sink.write_text("old answers")
    result = run("generate", "-i", str(source), "-o", str(sink), "-m", str(folder), code=2)
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    assert sink.read_text() == "old answers"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["hello", "-m", "nowhere"], "'nowhere' is not a folder"),
        (["hello", "-i", "x"], "exactly one of"),
        ([], "exactly one of"),
        (["hello", "--temperature", "-1"], "temperature is -1.0"),
        (["-i", "missing.jsonl"], "cannot read missing.jsonl"),
        (["hello", "--memory-limit", "lots"], "memory_limit is 'lots'"),
        (["hello", "--dtype", "int8"], "dtype is 'int8'"),
    ],
)
def test_wrong_options_are_refused(folder: Path, args: list[str], message: str) -> None:
    model = [] if "-m" in args else ["-m", str(folder)]
    assert message in " ".join(run("generate", *args, *model, code=2).stderr.split())


def test_unusual_but_valid_json_lines(folder: Path, tmp_path: Path) -> None:
    """Line separators inside strings, a byte order mark, nulls, and half a surrogate pair in a copied key."""
    source = tmp_path / "in.jsonl"
    lines = [
        '{"prompt": "a\u2028b\x85c", "stop": null, "max_tokens": null, "note": "\u2028"}',
        '{"prompt": "b", "prompt_token_ids": null, "id": "\\ud800", "prompt_logprobs": 1}',
    ]
    source.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    sink = tmp_path / "out.jsonl"
    run("generate", "-i", str(source), "-o", str(sink), "-m", str(folder), "--max-tokens", "3", "--max-model-len", "64")
    answers = {line["index"]: line for line in map(json.loads, sink.read_text(encoding="utf-8").split("\n")[:-1])}
    assert (answers[0]["note"], answers[1]["id"]) == ("\u2028", "\ud800")
    assert answers[1]["prompt_logprobs"][0] is None
    run("generate", "-i", str(sink), "-o", str(sink), "-m", str(folder), code=2)
    run("generate", "-i", str(source), "-o", str(source), "-m", str(folder), code=2)
    assert source.read_text(encoding="utf-8-sig").count("prompt_logprobs") == 1


def test_help_teaches() -> None:
    text = run("generate", "--help").stdout
    for word in ("--input", "--demo", "Examples", "prompt_token_ids", "messages"):
        assert word in text
    assert "generate" in run("--help").stdout
    assert run("--version").stdout.startswith("sidestream 0.")


def test_logprobs_without_a_place_to_show_them_are_refused() -> None:
    result = CliRunner().invoke(app, ["generate", "a", "--logprobs", "2"])
    assert result.exit_code == 2
    assert "--json" in result.output
