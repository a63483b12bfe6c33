"""``sidestream doctor``: what this machine can do, and what the engine will do with it."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sidestream.engine.doctor.report import DeviceChoice, Report

HELP = """
Probe this machine and say what the engine will do on it, and why.

Shows versions and hardware; what becomes of an event that crosses the boundary of a graph capture; what an eager break
between two graphs costs; how fast memory is copied; and the engine's defaults. Without a GPU the events are probed on
the simulated device, and rows that need a GPU say so.

A probe that fails shows its error in its own row. The exit code is 1 only if the device does not work at all.

**Examples**

- `sidestream doctor`
- `sidestream doctor --device cpu --json`
"""
STYLES = {"ok": "", "missing": "yellow", "skipped": "dim", "failed": "bold red"}


def doctor(
    device: Annotated[DeviceChoice, typer.Option(help="What to probe; auto takes a GPU if there is one.")] = (
        DeviceChoice.AUTO
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    from sidestream.engine.doctor.diagnose import diagnose

    console = Console(stderr=True)
    with console.status("probing"):
        report = diagnose(device)
    if as_json:
        sys.stdout.write(json.dumps(report.as_json(), indent=2) + "\n")
    else:
        Console().print(table(report))
    if not report.usable:
        raise typer.Exit(1)


doctor.__doc__ = HELP


def table(report: Report) -> Table:
    """The report for a reader: a block a section; colours tell what failed, is missing or was skipped."""
    made = Table(title=f"sidestream doctor, device {report.device}", title_justify="left")
    for heading in ("", "found", "why"):
        made.add_column(heading, overflow="fold")
    section = None
    for row in report.rows:
        if row.section != section:
            section = row.section
            made.add_section()
            made.add_row(Text(section, style="bold"))
        label, value, reason = row.cells()
        style = STYLES[row.finding.status.value]
        made.add_row(Text(f"  {label}"), Text(value, style=style), Text(reason, style="dim"))
    return made
