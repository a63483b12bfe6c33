"""``sidestream bench serve``: a load on a server with the OpenAI API, and the latencies that its clients see."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from sidestream.cli.workload_options import WORKLOAD, NumWarmups, Temperature, workload_options
from sidestream.engine.bench.workload import Workload
from sidestream.errors import ConfigError

if TYPE_CHECKING:
    from sidestream.engine.bench.load.outcome import Answer, Failure
    from sidestream.engine.bench.load.report import ServeReport

HELP = """
Measure a server with the OpenAI API: this one, vLLM, SGLang, others. Answers are streamed.

Without `--url` a server of our own is started on a free port, measured and stopped; what follows `--` goes to
`sidestream serve`.

Times, in milliseconds, are from the moment a request is sent: ttft to its first tokens, e2e to its end, tpot from the
first tokens to the last over the tokens behind the first, itl from one arrival of tokens to the next. Tokens are those
that the server counts (`usage`). Waiting for `--max-concurrency` is told apart.

Prompts are cut to their length with the tokenizer of `--model` or `--tokenizer`; without one, as the server's
`/tokenize` counts; without that, by the tokens that it counts in two short prompts.

**Examples**

- `sidestream bench serve --url http://localhost:8000 --num-prompts 500 --request-rate 8 --json result.json`
- `sidestream bench serve --url http://localhost:8000 --max-concurrency 32 --goodput ttft:500 --goodput tpot:50`
- `sidestream bench serve --url http://localhost:8000 --model meta-llama/Llama-3.1-8B` names the model in requests
- `sidestream bench serve --model path/to/checkpoint -- --max-num-seqs 64`
- `sidestream bench compare before.json after.json` compares two results
"""

LOAD = "Load and figures"


@workload_options()
def serve(
    options: Annotated[
        list[str] | None, typer.Argument(help="Behind `--`: options of `sidestream serve`, without `--url`.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="The server.", show_default="one of our own")] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            "-m",
            help="Folder or config.json, for a server of our own. With --url, the name in requests, and a tokenizer's "
            "folder if it is one.",
            show_default="the bundled model",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name in requests.", show_default="--model, or the server's first")
    ] = None,
    endpoint: Annotated[str, typer.Option(help="/v1/completions or /v1/chat/completions.")] = "/v1/completions",
    api_key: Annotated[
        str | None, typer.Option(envvar="SIDESTREAM_API_KEY", help="The server's key.", show_envvar=True)
    ] = None,
    *,
    workload: Workload,
    num_warmups: NumWarmups = 4,
    temperature: Temperature = 0.0,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder of the model's tokenizer, for exact lengths.", rich_help_panel=WORKLOAD),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Of random-ids.", show_default="the model's, or --tokenizer's", rich_help_panel=WORKLOAD),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Ask for answers of exactly --output-len tokens.",
            rich_help_panel=WORKLOAD,
        ),
    ] = True,
    extra_body: Annotated[
        str | None, typer.Option(help="Further fields of requests, as a JSON object.", rich_help_panel=WORKLOAD)
    ] = None,
    request_rate: Annotated[
        float,
        typer.Option(
            help="Requests a second, as a Poisson process of --seed; inf sends all at once.", rich_help_panel=LOAD
        ),
    ] = math.inf,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Requests open at once.", show_default="no limit", rich_help_panel=LOAD)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.", rich_help_panel=LOAD)] = 600.0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help="Objective in ms, like ttft:200; of ttft, tpot, e2e; may be given more than once.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    continuous_usage: Annotated[
        bool,
        typer.Option(
            "--continuous-usage",
            help="Ask for counts with every event: for models without text.",
            rich_help_panel=LOAD,
        ),
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report there.")] = None,
) -> None:
    from sidestream.cli.report_file import check_place, write
    from sidestream.engine.bench.load.http_client import Address
    from sidestream.engine.bench.load.measurement import LoadSettings, check, measure
    from sidestream.engine.bench.load.objectives import Objectives
    from sidestream.engine.bench.load.open_files import allow_connections
    from sidestream.engine.bench.load.openai_client import OpenAIClient

    if url is not None and options:
        raise ConfigError("--url names a server that runs; options behind -- are for one of our own")
    target = _target(url, model, tokenizer, vocab_size)
    if target.without_text and workload.dataset != "random-ids":
        raise ConfigError(f"dataset is {workload.dataset!r}, and the model has no tokenizer; use --dataset random-ids")
    settings = LoadSettings(
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        timeout=timeout,
        num_warmups=num_warmups,
        objectives=Objectives.of(goodput or ()),
        vocab_size=target.vocab_size,
        tokenizer=target.tokenizer,
    )
    client = OpenAIClient(
        address=Address.of(url or "http://127.0.0.1"),
        model=served_model_name or (str(model) if url is not None and model is not None else ""),
        endpoint=endpoint,
        api_key=api_key,
        temperature=temperature,
        ignore_eos=ignore_eos,
        continuous_usage=continuous_usage or target.without_text,
        extra=_fields(extra_body),
    )
    check(client, workload, settings)
    check_place(json_file)
    at_once = min(workload.num_prompts, max_concurrency or workload.num_prompts)
    if (room := allow_connections(at_once)) < at_once:
        raise ConfigError(
            f"up to {at_once} requests are open at once, and this system's limit of open files leaves room for {room}; "
            "give --max-concurrency, or raise the limit (ulimit -Hn)"
        )
    with _server(url, target.own, options or []) as address, _Bar() as bar:
        client = replace(client, address=Address.of(address))
        report = asyncio.run(measure(client, workload, settings, on_phase=bar.phase, on_outcome=bar.advance))
    _show(report)
    write(json_file, report.as_json())
    if not report.run.answers:
        raise typer.Exit(1)


serve.__doc__ = HELP


@dataclass(frozen=True, slots=True)
class _Target:
    """What is measured, as far as it can be known before a server answers.

    Attributes:
        own: the model of a server of our own; None if one runs elsewhere.
        tokenizer: to cut prompts with, if there is one.
        vocab_size: of random token ids.
    """

    own: Path | None
    tokenizer: Any | None
    vocab_size: int | None

    @property
    def without_text(self) -> bool:
        """Whether it is a server of our own that neither takes nor gives text."""
        return self.own is not None and self.tokenizer is None


def _target(url: str | None, model: Path | None, tokenizer: Path | None, vocab_size: int | None) -> _Target:
    from sidestream.config.model import ModelConfig
    from sidestream.engine.llm import bundled_model
    from sidestream.engine.tokenizer import load_tokenizer

    own = None if url is not None else model or bundled_model()
    if own is not None and not own.exists():
        raise ConfigError(f"model is {str(own)!r}: there is no such folder or config.json")
    folder = tokenizer or next((path for path in (own, model) if path is not None and path.is_dir()), None)
    words = None if folder is None else load_tokenizer(folder)
    if tokenizer is not None and words is None:
        raise ConfigError(f"tokenizer is {str(tokenizer)!r}, and there is none in that folder")
    if vocab_size is None:
        vocab_size = ModelConfig.from_hf(own).vocab_size if own is not None else None if words is None else len(words)
    return _Target(own, words, vocab_size)


def _fields(extra_body: str | None) -> dict[str, Any]:
    try:
        found = json.loads(extra_body or "{}")
    except ValueError as error:
        raise ConfigError(f"extra_body is {extra_body!r}: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"extra_body is {extra_body!r}; it must be a JSON object")
    return found


@contextmanager
def _server(url: str | None, own: Path | None, options: Sequence[str]) -> Iterator[str]:
    """The address of the server that runs, or of one that ends with the block."""
    from sidestream.engine.bench.load.child_server import child_server
    from sidestream.engine.bench.model_folder import model_folder

    if url is not None:
        yield url
        return
    assert own is not None
    console = Console(stderr=True, highlight=False, soft_wrap=True, style="dim")
    with model_folder(own) as (folder, without_weights):
        dummy = ["--load-format", "dummy", "--served-model-name", own.stem] if without_weights else []
        with child_server([str(folder), *dummy, *options], on_line=partial(console.print, markup=False)) as address:
            yield address


class _Bar:
    """Requests that came to an end, on stderr."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task: TaskID | None = None

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def phase(self, name: str, count: int) -> None:
        self._task = self._bar.add_task(name, total=count)

    def advance(self, outcome: Answer | Failure) -> None:
        if self._task is not None:
            self._bar.advance(self._task)


def _show(report: ServeReport) -> None:
    console = Console(highlight=False)
    server, workload = report.server, report.workload
    console.print(
        f"{server['model']} at {server['url']}{server['endpoint']}: {workload['num_prompts']} {workload['dataset']} "
        f"prompts of {report.prompt_length}, answers of {workload['output_len']}",
        markup=False,
        soft_wrap=True,
    )
    for line in report.lines():
        console.print(line, markup=False, soft_wrap=True)
    table = Table()
    for heading in ("ms", "mean", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="left" if heading == "ms" else "right")
    for row in report.rows():
        table.add_row(*row)
    if table.row_count:
        console.print(table)
    for line in report.warnings():
        console.print(line, markup=False, style="yellow", soft_wrap=True)
