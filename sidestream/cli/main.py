"""The ``sidestream`` command."""

from __future__ import annotations

import sys
from contextlib import suppress

import typer
from rich.console import Console

from sidestream import __version__
from sidestream.cli.bench import app as bench
from sidestream.cli.capacity import capacity
from sidestream.cli.doctor import doctor
from sidestream.cli.eval import evaluate
from sidestream.cli.generate import generate
from sidestream.cli.help_page import HelpCommand, HelpGroup
from sidestream.cli.inspect import inspect
from sidestream.cli.serve import serve
from sidestream.cli.standard_streams import complain, fill_closed, let_go, reason
from sidestream.cli.verify import verify
from sidestream.errors import SidestreamError

app = typer.Typer(
    name="sidestream",
    help="Inference for sparse-MLA language models: the same tokens in every mode, on Hopper GPUs and whole on a CPU.",
    cls=HelpGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(serve)
app.command()(doctor)
app.command()(verify)
app.command("eval")(evaluate)
app.command()(inspect)
app.command()(capacity)
app.add_typer(bench, name="bench", cls=HelpGroup)
for registered in (*app.registered_commands, *bench.registered_commands):
    registered.cls = HelpCommand


def _version(value: bool) -> None:
    if value:
        typer.echo(f"sidestream {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Options of the command itself."""


def main() -> None:
    """Entry point: a known error is one line on stderr and exit code 2, not a traceback."""
    fill_closed()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has gone
        sys.exit(1)
    except OSError as error:
        complain(f"cannot {'write the output' if error.filename is None else 'use a file'}: {reason(error)}")
        sys.exit(1)
    except SidestreamError as error:
        with suppress(OSError):
            Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: ", end="", highlight=False)
        complain(str(error))
        sys.exit(2)
    finally:
        let_go(sys.stdout)
        let_go(sys.stderr)


if __name__ == "__main__":
    main()
