"""``sidestream bench``: how fast a model decodes and prefills on this machine, beside the floor of its bytes."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sidestream.errors import ConfigError

HELP = """
Measure inter-token latency and prefill speed of a checkpoint, or of a config.json with dummy weights.

Requests run through the engine as in service. The time of a decode step is that between two steps which give every
sequence a token; its floor is the bytes that such a step must touch, over the rate at which this device copies,
measured in the same run. Contexts of decodes hold random numbers; prompts of prefills are computed.

**Examples**

- `sidestream bench latency` measures the small checkpoint that ships with Sidestream
- `sidestream bench latency path/to/checkpoint --batch 1 --batch 32 --context 8192 --json result.json`
- `sidestream bench latency path/to/config.json --prefill 8192`
- `sidestream bench latency --compare before.json after.json`
"""

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="Measure speed.")


def latency(
    model: Annotated[
        Path | None, typer.Argument(help="Checkpoint folder or config.json; the bundled checkpoint without it.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences that decode; several may be given.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens behind each; several may be given.")] = None,
    prefill: Annotated[list[int] | None, typer.Option(help="Tokens of a prompt; several may be given.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of each repeat.")] = 100,
    repeats: Annotated[int, typer.Option(help="Of each measurement.")] = 3,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    load_format: Annotated[str, typer.Option(help="auto, or dummy for seeded random weights.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, bf16, fp8_ds_mla or mxfp8.")] = "auto",
    mode: Annotated[str, typer.Option(help="auto, none, piecewise, full or full_and_piecewise.")] = "auto",
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens a step.")] = 1024,
    max_capture_tokens: Annotated[int | None, typer.Option(help="Largest mixed batch with a graph.")] = None,
    memory_limit: Annotated[str | None, typer.Option(help="'40GiB' or '60%'.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report there.")] = None,
    ledger: Annotated[bool, typer.Option("--ledger", help="Show what takes memory.")] = False,
    compare: Annotated[tuple[Path, Path] | None, typer.Option(help="Two reports, for their ratios.")] = None,
) -> None:
    console = Console(highlight=False)
    if compare is not None:
        console.print(ratios(*compare))
        return
    from sidestream.config.engine import EngineConfig
    from sidestream.engine.bench.run import LatencySettings, measure, open_engine
    from sidestream.engine.llm import bundled_model

    asked = batch or context or not prefill  # a prefill alone is a measurement too
    settings = LatencySettings(
        cases=tuple(product(batch or [1], context or [1024])) if asked else (),
        prefills=tuple(prefill or ()),
        steps=steps,
        repeats=repeats,
        temperature=temperature,
    )
    user = EngineConfig(
        device=device,
        dtype=dtype,
        load_format=load_format,
        kv_cache_dtype=kv_cache_dtype,
        cudagraph_mode=mode,
        max_num_batched_tokens=max_num_batched_tokens,
        max_capture_tokens=max_capture_tokens,
        memory_limit=memory_limit,
    )
    source = model if model is not None else bundled_model()
    built = open_engine(source, user, settings)
    config = built.config
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in built.startup.items())
    console.print(f"{source}: {config.dtype} on {config.device}, {config.cudagraph_mode}", markup=False, soft_wrap=True)
    console.print(f"ready after {sum(built.startup.values()):.1f} s: {phases}", style="dim", soft_wrap=True)
    command = ["sidestream", *sys.argv[1:]]
    report = measure(
        built, settings, model=str(source), command=command, on_row=lambda row: console.print(row, soft_wrap=True)
    )
    late = built.compiled_after_ready()
    if late:
        console.print(f"{len(late)} kernels were compiled after the engine was ready", style="yellow")
    if ledger:
        console.print(str(built.ledger_now()), markup=False)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(), indent=1) + "\n")


latency.__doc__ = HELP
app.command()(latency)


def ratios(first: Path, second: Path) -> Table:
    """A row for each figure that both reports have."""
    from sidestream.engine.bench.report import compare

    made = Table()
    for heading in ("", first.name, second.name, "times as slow"):
        made.add_column(heading, justify="left" if not heading else "right")
    for row in compare(read(first), read(second)):
        made.add_row(row.name, f"{row.first:,.4g} {row.unit}", f"{row.second:,.4g} {row.unit}", f"{row.slower:.3f}")
    return made


def read(path: Path) -> dict[str, Any]:
    """A report that was written before; ConfigError if it is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the report {path}: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a report of `sidestream bench latency --json`")
    return found
