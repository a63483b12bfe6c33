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

Each figure that both have is a row. The last column says how many times as slow SECOND is: above 1 it is slower, be the
figure a time or a rate. Settings in which the two differ are named below.

- `sidestream bench compare before.json after.json`
"""


def compare(
    first: Annotated[Path, typer.Argument(help="A result, say of before a change.")],
    second: Annotated[Path, typer.Argument(help="A result of the same command.")],
) -> None:
    from sidestream.cli.report_file import read
    from sidestream.engine.bench.comparison import compare as ratios_of

    found = ratios_of(read(first), read(second))
    names = (first.name, second.name) if first.name != second.name else (str(first), str(second))
    table = Table(title=f"bench {found.kind}", title_justify="left")
    table.add_column("")
    for heading in (*names, "times as slow"):
        table.add_column(heading, justify="right", overflow="fold")
    for row in found.ratios:
        slower = "-" if row.slower is None else f"{row.slower:.3f}"
        table.add_row(row.name, f"{row.first:,.4g} {row.unit}", f"{row.second:,.4g} {row.unit}", slower)
    console = Console(highlight=False)
    console.print(table)
    for line in found.differences:
        console.print(f"they differ in {line}" if ": " in line else line, markup=False, style="yellow", soft_wrap=True)


compare.__doc__ = HELP
