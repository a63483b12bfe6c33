"""``sidestream bench latency``: how fast a model decodes and prefills here, beside the floor of its bytes."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sidestream.cli.engine_options import (
    CudagraphMode,
    Device,
    Dtype,
    KvCacheDtype,
    LoadFormat,
    MaxCaptureTokens,
    MaxNumBatchedTokens,
    MemoryLimit,
)
from sidestream.config.engine import DEFAULT_MAX_NUM_BATCHED_TOKENS

HELP = """
Measure inter-token latency and prefill speed of a checkpoint, or of a config.json with dummy weights.

Requests run through the engine as in service. The time of a decode step is that between two steps which give every
sequence a token; its floor is the bytes that such a step must touch, over the rate at which this device copies,
measured in the same run. Contexts of decodes hold random numbers; prompts of prefills are computed.

**Examples**

- `sidestream bench latency` measures the small checkpoint that ships with Sidestream
- `sidestream bench latency path/to/checkpoint --batch 1 --batch 32 --context 8192 --json result.json`
- `sidestream bench latency path/to/config.json --prefill 8192`
- `sidestream bench compare before.json after.json` compares two results
"""


def latency(
    model: Annotated[
        Path | None, typer.Argument(help="Checkpoint folder or config.json; the bundled checkpoint without it.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences that decode; repeat it.", show_default="1")] = None,
    context: Annotated[
        list[int] | None, typer.Option(help="Tokens behind each; likewise.", show_default="1024")
    ] = None,
    prefill: Annotated[list[int] | None, typer.Option(help="Tokens of a prompt; likewise.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of each repeat.")] = 100,
    repeats: Annotated[int, typer.Option(help="Of each measurement; figures are the repeats' medians.")] = 3,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    load_format: LoadFormat = "auto",
    max_num_batched_tokens: MaxNumBatchedTokens = DEFAULT_MAX_NUM_BATCHED_TOKENS,
    cudagraph_mode: CudagraphMode = "auto",
    max_capture_tokens: MaxCaptureTokens = None,
    memory_limit: MemoryLimit = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report there.")] = None,
    ledger: Annotated[bool, typer.Option("--ledger", help="Show what takes memory.")] = False,
) -> None:
    from sidestream.cli.report_file import check_place, write
    from sidestream.config.engine import EngineConfig
    from sidestream.engine.bench.run import LatencySettings, measure, open_engine
    from sidestream.engine.llm import bundled_model

    check_place(json_file)
    console = Console(highlight=False)
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
        cudagraph_mode=cudagraph_mode,
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
    write(json_file, report.as_json())


latency.__doc__ = HELP
