"""How ``--help`` looks: as wide as the terminal, no name cut, options under headings with their defaults."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from sidestream.cli.vllm_flags import hint

WIDTH_ELSEWHERE = 100
"""Columns where there is no terminal, and ``COLUMNS`` is not set."""
LEAST_WIDTH = 40
NAMES = 34
"""Most columns of a name that has its text beside it; the text of a longer one begins on the next line."""


class HelpCommand(TyperCommand):
    """A command with this page, which knows what vLLM's flags are called here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        if found := hint(args, known):
            ctx.fail(found)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write("\n".join(page(self, ctx)) + "\n")


class HelpGroup(TyperGroup):
    """A group of commands with this page."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write("\n".join(page(self, ctx)) + "\n")


def page(command: TyperCommand | TyperGroup, ctx: Any) -> Iterator[str]:
    """The lines of a command's help."""
    width = max(LEAST_WIDTH, shutil.get_terminal_size((WIDTH_ELSEWHERE, 24)).columns)
    yield from textwrap.wrap(command.get_usage(ctx), width, subsequent_indent="    ")
    yield from prose(command.help or "", width)
    sections: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None:
            other = "Arguments" if param.param_type_name == "argument" else "Options"
            name, text = (
                re.sub(r"<list\[(\w+)\]>", r"<\1>...", record[0]),
                re.sub(r"default: \((.*)\)", r"default: \1", record[1]),
            )
            sections.setdefault(getattr(param, "rich_help_panel", None) or other, []).append((name, text))
    if isinstance(command, TyperGroup):
        for name in command.list_commands(ctx):
            found = command.get_command(ctx, name)
            if found is not None and not found.hidden:
                sections.setdefault("Commands", []).append((name, plain(_first_paragraph(found.help or ""))))
    for heading, rows in sections.items():
        yield ""
        yield typer.style(heading, bold=True)
        yield from table(rows, width)


def prose(text: str, width: int) -> Iterator[str]:
    """Paragraphs and bullets, wrapped; an empty line before each paragraph."""
    for paragraph in re.split(r"\n\s*\n", textwrap.dedent(text).strip()):
        if not paragraph:
            continue
        yield ""
        for part in re.split(r"\n(?=- )", paragraph):
            yield from textwrap.wrap(
                plain(part), width, subsequent_indent="  " if part.startswith("- ") else "", break_on_hyphens=False
            )


def table(rows: Iterable[tuple[str, str]], width: int) -> Iterator[str]:
    """Names and what they mean, side by side as far as the names allow it."""
    rows = list(rows)
    column = 2 + max((len(name) for name, _ in rows if len(name) <= NAMES), default=0) + 2
    column = min(column, width // 2)
    for name, text in rows:
        wrapped = textwrap.wrap(plain(text), max(width - column, LEAST_WIDTH // 2), break_on_hyphens=False)
        beside = 2 + len(name) + 2 <= column
        yield f"  {name}".ljust(column) + (wrapped[0] if beside and wrapped else "")
        yield from (" " * column + line for line in wrapped[beside:])


def plain(text: str) -> str:
    """Without marks of emphasis and code, on one line."""
    return " ".join(text.replace("**", "").replace("`", "").split())


def _first_paragraph(text: str) -> str:
    return re.split(r"\n\s*\n", text.strip())[0]
