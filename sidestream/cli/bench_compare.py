"""``sidestream bench compare``: two result files of one kind, as ratios."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

HELP = """
Compare two result files of the same command, written with `--json`: of latency, throughput, serve, shared-prefix or
multi-turn.

Each figure that both have is a row. The last column says by what factor SECOND is faster or slower, be the figure a
time or a rate. Settings in which the two differ, and figures that only one has, are named below.

- `sidestream bench compare before.json after.json`
- `sidestream bench compare before.json after.json --json ratios.json`
"""


def compare(
    first: Annotated[Path, typer.Argument(help="A result, say of before a change.")],
    second: Annotated[Path, typer.Argument(help="A result of the same command.")],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the comparison there.")] = None,
) -> None:
    from sidestream.cli.report_file import check_place, read, write
    from sidestream.engine.bench.comparison import compare as ratios_of

    check_place(json_file)
    found = ratios_of(read(first), read(second))
    names = (first.name, second.name) if first.name != second.name else (str(first), str(second))
    table = Table(title=f"bench {found.kind}", title_justify="left")
    table.add_column("")
    for heading in (*names, f"{names[1]} is"):
        table.add_column(heading, justify="right", overflow="fold")
    for row in found.ratios:
        table.add_row(row.name, _number(row.first, row.unit), _number(row.second, row.unit), _speed(row.slower))
    console = Console(highlight=False)
    console.print(table)
    lines = [f"they differ in {line}" if ": " in line else line for line in found.differences]
    for name, only in zip(names, (found.only_first, found.only_second), strict=True):
        if only:
            lines.append(f"only {name} has {'; '.join(only)}")
    for line in lines:
        console.print(line, markup=False, style="yellow", soft_wrap=True)
    write(json_file, found.as_json() | {"first": str(first), "second": str(second)})


compare.__doc__ = HELP


def _number(value: float, unit: str) -> str:
    """At least four digits, and never an exponent where numbers are large."""
    return f"{value:,.0f} {unit}" if abs(value) >= 1000 else f"{value:.4g} {unit}"


def _speed(slower: float | None) -> str:
    if slower is None:
        return "-"
    factor = f"{max(slower, 1 / slower):.3f}"
    return "the same" if factor == "1.000" else f"{factor} x {'slower' if slower > 1 else 'faster'}"
