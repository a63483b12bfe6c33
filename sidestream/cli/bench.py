"""``sidestream bench``: the group of commands that measure speed."""

from __future__ import annotations

import typer

from sidestream.cli.bench_compare import compare
from sidestream.cli.bench_latency import latency
from sidestream.cli.bench_prefix import multi_turn, shared_prefix
from sidestream.cli.bench_serve import serve
from sidestream.cli.bench_throughput import throughput

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="Measure speed.")
app.command()(latency)
app.command()(throughput)
app.command()(serve)
app.command()(compare)
app.command("shared-prefix")(shared_prefix)
app.command("multi-turn")(multi_turn)
