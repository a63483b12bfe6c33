"""``sidestream bench throughput``: how much work an engine in this process does when all of it is there at once."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sidestream.cli.engine_options import engine_options
from sidestream.cli.workload_options import NumWarmups, Temperature, workload_options
from sidestream.config.engine import EngineConfig
from sidestream.engine.bench.workload import Workload
from sidestream.errors import ConfigError

HELP = """
Measure offline throughput: all prompts are given to an engine at once, text in and text out.

Prompts are real text by default. Answers are as long as `--output-len` says, whatever the model would say. The prefix
cache is off, so that every repeat computes what the first did. Times to the first token (ttft) contain the wait behind
other requests; times are in milliseconds.

**Examples**

- `sidestream bench throughput` measures the small checkpoint that ships with Sidestream
- `sidestream bench throughput path/to/checkpoint --num-prompts 500 --input-len 1024 --json result.json`
- `sidestream bench throughput path/to/checkpoint --dataset book.txt --range-ratio 0.5`
- `sidestream bench throughput path/to/config.json --dataset random-ids` takes dummy weights
- `sidestream bench compare before.json after.json` compares two results
"""


@workload_options()
@engine_options(
    "seed",
    "max_model_len",
    "prefill_pacing",
    "stream_policy",
    "graph_debug",
    "enable_prefix_caching",
    "num_prefix_snapshots",
    "prefix_snapshot_interval",
    "hisparse_staged_tokens",
    "max_form_seconds",
)
def throughput(
    model: Annotated[
        Path | None, typer.Argument(help="Checkpoint folder or config.json; the bundled checkpoint without it.")
    ] = None,
    *,
    workload: Workload,
    num_warmups: NumWarmups = 8,
    temperature: Temperature = 0.0,
    repeats: Annotated[int, typer.Option(help="Of the whole workload; figures are their medians.")] = 3,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of a tokenizer, for a model that has none; it gets token ids then.")
    ] = None,
    engine: EngineConfig,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report there.")] = None,
) -> None:
    from sidestream.cli.report_file import check_place, write
    from sidestream.engine.bench.model_folder import model_folder
    from sidestream.engine.bench.throughput import jobs_for, measure
    from sidestream.engine.llm import LLM, bundled_model
    from sidestream.engine.tokenizer import load_tokenizer

    check_counts(repeats=(repeats, 1), num_warmups=(num_warmups, 0))
    check_place(json_file)
    source = model if model is not None else bundled_model()
    words = load_tokenizer(tokenizer) if tokenizer is not None else None
    if tokenizer is not None and words is None:
        raise ConfigError(f"tokenizer is {tokenizer}, and there is none in that folder")
    with model_folder(source) as (folder, without_weights):
        length = workload.longest_input + workload.longest_output
        own = replace(engine, max_model_len=length, enable_prefix_caching=False)
        if without_weights:
            own = replace(own, load_format="dummy")
        llm = LLM(folder, **asdict(own))
    console = Console(highlight=False)
    config = llm.built.config
    about = f"{source}: {config.dtype} on {config.device}, {config.cudagraph_mode}, {workload.dataset} prompts"
    console.print(about, markup=False, soft_wrap=True)
    warm, jobs = jobs_for(llm, workload, warm_ups=num_warmups, tokenizer=words)
    report = measure(
        llm,
        workload,
        warm,
        jobs,
        model=str(source),
        repeats=repeats,
        temperature=temperature,
        on_run=lambda run: console.print(str(run), markup=False, soft_wrap=True),
    )
    table = Table()
    table.add_column("")
    for heading in ("median", "least", "most"):
        table.add_column(heading, justify="right")
    for name, spread in report.spreads.items():
        table.add_row(name, *(f"{value:,.2f}" for value in (spread.median, spread.min, spread.max)))
    console.print(table)
    if late := llm.built.compiled_after_ready():
        console.print(f"{len(late)} kernels were compiled after the engine was ready", style="yellow")
    write(json_file, report.as_json())


throughput.__doc__ = HELP


def check_counts(**counts: tuple[int, int]) -> None:
    """Each option's value and the least that is allowed.

    Raises:
        ConfigError: naming the first that is less.
    """
    for name, (value, least) in counts.items():
        if value < least:
            raise ConfigError(f"{name} is {value}, at least {least} is needed")
