"""``sidestream verify``: the same tokens in every mode, proved on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from sidestream.cli.engine_options import Dtype, LoadFormat
from sidestream.engine.doctor.report import DeviceChoice
from sidestream.engine.verify.report import SCHEDULES, Cell, Report, Rule

HELP = """
Prove on this machine that a checkpoint gives the same tokens in every mode.

Seeded prompts, half of them longer than the model's index_topk, are completed greedily under every schedule (prefill
in one shot or in chunks, alone or batched) in every graph mode. At equal schedule, tokens and log-probabilities must be
equal to the last bit. Between schedules, tokens must be equal up to a step whose two most likely tokens are closer than
the margin, and log-probabilities up to there must differ by less than it.

Without a GPU the modes run on the simulated device, which captures and replays graphs on the CPU and reports every
unordered access, and the plain CPU engine is compared too. On two cores that takes about 20 minutes for the bundled
model, and 3 with `--tokens 6 --prompts 4 --max-num-seqs 2`.

If anything differs, the prompt is run again with every layer's output recorded, the first differing step and layer are
named, and the exit code is 1.

**Examples**

- `sidestream verify --tokens 8 --prompts 4` checks the small checkpoint that ships with Sidestream
- `sidestream verify --hisparse path/to/checkpoint` compares engines whose device is short of room as well
- `sidestream verify path/to/checkpoint --json > report.json`
- `sidestream verify path/to/config-only --load-format dummy`
"""


def verify(
    model: Annotated[
        Path | None, typer.Argument(help="Folder of a hub checkpoint.", show_default="the bundled one")
    ] = None,
    device: Annotated[DeviceChoice, typer.Option(help="auto takes a GPU if there is one, else sim.")] = (
        DeviceChoice.AUTO
    ),
    dtype: Dtype = "auto",
    load_format: LoadFormat = "auto",
    tokens: Annotated[int, typer.Option(help="Tokens generated behind each prompt.")] = 64,
    prompts: Annotated[int, typer.Option(help="How many; every second one is longer than index_topk.")] = 16,
    max_num_seqs: Annotated[int, typer.Option(help="Prompts that run at once where they are batched.")] = 4,
    margin: Annotated[
        float | None,
        typer.Option(help="Bound between schedules, in nats.", show_default="0.001 for float32, 0.125 for bfloat16"),
    ] = None,
    hisparse: Annotated[
        bool, typer.Option("--hisparse", help="Run every mode with its KV rows in a host pool too.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the prompts, and of dummy weights.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    from sidestream.engine.bundled import bundled_model
    from sidestream.engine.verify.settings import VerifySettings
    from sidestream.engine.verify.verification import verify as run

    settings = VerifySettings(
        device=device.value,
        dtype=dtype,
        load_format=load_format,
        tokens=tokens,
        prompts=prompts,
        max_num_seqs=max_num_seqs,
        margin=margin,
        hisparse=hisparse,
        seed=seed,
    )
    with _Shown() as progress:
        report = run(model if model is not None else bundled_model(), settings, progress)
    if as_json:
        sys.stdout.write(json.dumps(report.as_json(), indent=2) + "\n")
    else:
        show(report, Console(highlight=False))
    if not report.passed:
        raise typer.Exit(1)


verify.__doc__ = HELP


class _Shown:
    """Progress on stderr; implements ``engine.verify.engines.Progress``."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task: TaskID | None = None

    def __enter__(self) -> _Shown:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def begin(self, label: str, tokens: int) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(label, total=tokens)
        if not self._console.is_terminal:
            self.note(label)

    def advance(self, tokens: int) -> None:
        if self._task is not None:
            self._progress.advance(self._task, tokens)

    def note(self, text: str) -> None:
        self._console.print(Text(text), style="dim", soft_wrap=True)


def show(report: Report, console: Console) -> None:
    """Print the table, then what is wrong, or that nothing is."""
    console.print(f"sidestream verify {report.model}: {report.dtype} on {report.device}", soft_wrap=True, markup=False)
    for line in facts(report):
        console.print(line, style="dim", soft_wrap=True, markup=False)
    console.print(table(report))
    for engine in report.engines:
        for reason, count in report.fallbacks(engine).items():
            steps = "1 step" if count == 1 else f"{count} steps"
            console.print(f"{engine}: {steps} without a graph: {reason}", style="dim", soft_wrap=True)
    for problem in report.problems():
        console.print(problem, style="bold red", soft_wrap=True, markup=False)
    count = len(report.problems())
    same = "the same tokens in every mode" if len(report.engines) > 1 else "the same tokens under every schedule"
    verdict = same if report.passed else f"{count} problem{'s' if count > 1 else ''}"
    console.print(verdict, style="bold green" if report.passed else "bold red")


def facts(report: Report) -> list[str]:
    """What was run, and the bound."""
    lengths, topk = report.prompt_lengths, report.index_topk
    long = f", {report.selecting} of them longer than index_topk {topk}" if topk is not None else ""
    prompts = f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens{long}"
    how = f"{report.tokens} tokens each, greedy; chunks of {report.chunk}, {report.max_num_seqs} at once"
    bound = f"within: largest difference of log-probabilities, bound {report.margin:g}"
    return [
        f"{prompts}; {how}; seed {report.seed}",
        f"same bits: as {report.engines[0]} at the same schedule; {bound}",
    ]


def table(report: Report) -> Table:
    """A row a schedule, a column an engine; below, in which mode each engine's steps ran, and the hazards found."""
    made = Table()
    made.add_column("schedule")
    for engine in report.engines:
        made.add_column(engine, overflow="fold")
    for schedule in SCHEDULES:
        cells = [report.cell(engine, schedule) for engine in report.engines]
        made.add_row(str(schedule), *(Text(cell.verdict(), style=_style(cell)) for cell in cells))
    made.add_section()
    made.add_row("steps", *(Text(steps_of(report, engine), style="dim") for engine in report.engines))
    if report.hazards:
        found = (report.hazards.get(engine) for engine in report.engines)
        made.add_row("hazards", *("" if h is None else Text(str(len(h)), "bold red" if h else "") for h in found))
    return made


def steps_of(report: Report, engine: str) -> str:
    """Steps of all of an engine's cells by graph mode; empty where there are no graphs."""
    return ", ".join(f"{count} {mode}" for mode, count in sorted(report.steps(engine).items()))


def _style(cell: Cell) -> str:
    if not cell.passed:
        return "bold red"
    return "dim" if cell.rule is Rule.REFERENCE else "green"
