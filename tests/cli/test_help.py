"""``--help`` of every command: as wide as the terminal, whole names, every option with what it is without it."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sidestream.cli.help_page import prose, table
from sidestream.cli.main import app
from sidestream.cli.vllm_flags import HINTS
from sidestream.config.engine import EngineConfig

SERVER_PAGE = Path(__file__).parents[2] / "docs" / "server.md"
COMMANDS = ("generate", "serve", "doctor", "verify", "eval", "inspect", "capacity")
GROUP: Any = typer.main.get_command(app)


def page(*words: str, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    result = CliRunner().invoke(app, [*words, "--help"], prog_name="sidestream")
    assert result.exit_code == 0, result.output
    return result.output


def params(command: str) -> list[Any]:
    return [param for param in GROUP.commands[command].params if param.name != "help"]


@pytest.mark.parametrize("command", [*COMMANDS, "bench"])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_page_is_as_wide_as_the_terminal(command: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page(command, width=width, monkeypatch=monkeypatch)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text
    names = {word.rstrip(",") for word in text.split()}
    for param in GROUP.commands[command].params:
        if param.param_type_name == "option":
            assert {*param.opts, *param.secondary_opts} <= names
    if width == 200 and command != "bench":
        assert max(map(len, lines)) > 100, "a wide terminal is used"


def test_where_there_is_no_terminal_a_page_is_not_cut_to_80(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, CliRunner().invoke(app, ["serve", "--help"]).output.splitlines())) > 80


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_is_without_it(command: str) -> None:
    context = typer.Context(GROUP.commands[command], info_name=command)
    for param in params(command):
        _, text = param.get_help_record(context)
        assert param.help, f"{command} {param.name} has no text"
        if param.param_type_name == "option" and not (param.is_flag and not param.secondary_opts):
            assert "default: " in text, f"{command} --{param.name} names no default"


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_every_setting_of_the_engine_is_an_option(command: str) -> None:
    """With the same default; what ``--seed`` of ``generate`` means is the request's."""
    given = {param.name: param for param in params(command)}
    for field in fields(EngineConfig):
        assert field.name in given, f"{command} has no option for {field.name}"
        if field.name not in ("seed", "prefill_pacing"):  # the latter is on in a server and off in generate
            assert given[field.name].default == field.default


def test_a_group_lists_its_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = page(width=100, monkeypatch=monkeypatch).splitlines()
    listed = {line.split()[0] for line in lines[lines.index("Commands") :] if line.startswith("  ")}
    assert {*COMMANDS, "bench"} <= listed


def test_long_names_stand_on_a_line_of_their_own() -> None:
    rows = [("--short <int>", "What it is."), ("--a-name-that-is-longer-than-the-column <int>", "one two three")]
    assert list(table(rows, 44)) == [
        "  --short <int>  What it is.",
        "  --a-name-that-is-longer-than-the-column <int>",
        "                 one two three",
    ]


def test_prose_keeps_bullets_and_drops_marks() -> None:
    text = "First `code`\ngoes on.\n\n**Examples**\n\n- one\n- two is\nlonger than it\n"
    assert list(prose(text, 20)) == [
        "",
        "First code goes on.",
        "",
        "Examples",
        "",
        "- one",
        "- two is longer than",
        "  it",
    ]


@pytest.mark.parametrize("flag", HINTS)
def test_flags_of_vllms_say_what_they_are_called_here(flag: str) -> None:
    for given in ([flag, "2"], [f"{flag}=2"], ["--port", "1", flag]):
        result = CliRunner().invoke(app, ["serve", *given])
        assert result.exit_code == 2
        assert f"Error: {flag} is a flag of vLLM's: {HINTS[flag]}" in result.output
    options = {name for param in params("serve") for name in (*param.opts, *param.secondary_opts)}
    assert flag not in options
    assert set(re.findall(r"--[a-z-]+", HINTS[flag])) <= options, "a hint names options that there are"
    assert f"`{flag}`" in SERVER_PAGE.read_text()


def test_words_behind_two_dashes_are_not_the_commands() -> None:
    assert "flag of vLLM's" not in CliRunner().invoke(app, ["serve", "--", "-tp"]).output
