"""Options that a command gets as one object: what is given, what is not, and what --help lists."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import typer
from typer.testing import CliRunner

from sidestream.cli.engine_options import OPTIONS, engine_options
from sidestream.cli.option_group import option_group
from sidestream.config.engine import EngineConfig


@dataclass(frozen=True)
class Place:
    x: int = 1
    y: int = 2
    z: int = 3


def make_app(seen: list[object]) -> typer.Typer:
    app = typer.Typer()
    options = {name: Annotated[int, typer.Option(help=name.upper())] for name in ("y", "x")}

    @app.command()
    @option_group("place", Place, options, {"y": 7})
    def command(word: str, first: bool = False, *, place: Place, last: bool = False) -> None:
        """What it does."""
        seen.append((word, first, place, last))

    return app


def test_a_command_gets_an_object_of_what_was_given() -> None:
    seen: list[object] = []
    app = make_app(seen)
    for words in (["a"], ["b", "--x", "5", "--last"], ["c", "--first", "--y", "0"]):
        assert CliRunner().invoke(app, words).exit_code == 0
    assert seen == [
        ("a", False, Place(1, 7, 3), False),
        ("b", False, Place(5, 7, 3), True),
        ("c", True, Place(1, 0, 3), False),
    ]
    assert CliRunner().invoke(app, ["a", "--z", "1"]).exit_code == 2, "it has no option for that field"


def test_options_stand_where_the_object_does() -> None:
    command = typer.main.get_command(make_app([]))
    assert [param.name for param in command.params if not (param.name or "").startswith(("install", "show"))] == [
        "word",
        "first",
        "y",
        "x",
        "last",
    ]
    assert command.help == "What it does."


def test_every_setting_of_an_engine_has_an_option() -> None:
    assert OPTIONS.keys() == {field.name for field in fields(EngineConfig)}


def test_an_engine_without_some_options_has_their_defaults() -> None:
    seen: list[EngineConfig] = []
    app = typer.Typer()

    @app.command()
    @engine_options("seed", max_num_seqs=3)
    def command(*, engine: EngineConfig) -> None:
        seen.append(engine)

    assert CliRunner().invoke(app, ["--block-size", "32", "--no-prefix-caching"]).exit_code == 0
    assert seen == [EngineConfig(block_size=32, max_num_seqs=3, enable_prefix_caching=False, prefill_pacing=None)]
    assert CliRunner().invoke(app, ["--seed", "1"]).exit_code == 2
