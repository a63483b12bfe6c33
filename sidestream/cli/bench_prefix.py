"""``sidestream bench shared-prefix`` and ``multi-turn``: what the prefix cache saves on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sidestream.cli.engine_options import (
    CudagraphMode,
    Device,
    MaxNumBatchedTokens,
    MemoryLimit,
    PrefixSnapshotInterval,
)
from sidestream.config.engine import DEFAULT_MAX_NUM_BATCHED_TOKENS

if TYPE_CHECKING:
    from sidestream.engine.bench.prefix import MultiTurn, SharedPrefix

Model = Annotated[
    Path | None, typer.Argument(help="Checkpoint folder or config.json; the bundled checkpoint without it.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures there.")]
Answer = Annotated[int, typer.Option(help="Tokens of each answer.")]
Seed = Annotated[int, typer.Option(help="Of the prompts, which are random token ids.")]
AtOnce = Annotated[int, typer.Option(help="Requests at a time.")]


def shared_prefix(
    model: Model = None,
    requests: Annotated[int, typer.Option(help="How many.")] = 32,
    shared: Annotated[int, typer.Option(help="Tokens with which every prompt begins.")] = 512,
    tail: Annotated[int, typer.Option(help="Tokens of each prompt's own.")] = 100,
    answer: Answer = 16,
    concurrency: AtOnce = 4,
    seed: Seed = 0,
    device: Device = "auto",
    max_num_batched_tokens: MaxNumBatchedTokens = DEFAULT_MAX_NUM_BATCHED_TOKENS,
    cudagraph_mode: CudagraphMode = "auto",
    memory_limit: MemoryLimit = None,
    prefix_snapshot_interval: PrefixSnapshotInterval = None,
    json_file: JsonFile = None,
) -> None:
    """Measure prompts that share a system prompt, with the prefix cache and without it."""
    from sidestream.engine.bench.prefix import SharedPrefix

    _run(
        SharedPrefix(requests=requests, shared=shared, tail=tail, answer=answer, concurrency=concurrency),
        model,
        seed=seed,
        device=device,
        cudagraph_mode=cudagraph_mode,
        max_num_batched_tokens=max_num_batched_tokens,
        memory_limit=memory_limit,
        interval=prefix_snapshot_interval,
        json_file=json_file,
    )


def multi_turn(
    model: Model = None,
    chats: Annotated[int, typer.Option(help="Conversations.")] = 4,
    turns: Annotated[int, typer.Option(help="Of each conversation.")] = 8,
    system: Annotated[int, typer.Option(help="Tokens of the system prompt.")] = 200,
    message: Annotated[int, typer.Option(help="Tokens of each message.")] = 50,
    answer: Answer = 50,
    concurrency: AtOnce = 4,
    seed: Seed = 0,
    device: Device = "auto",
    max_num_batched_tokens: MaxNumBatchedTokens = DEFAULT_MAX_NUM_BATCHED_TOKENS,
    cudagraph_mode: CudagraphMode = "auto",
    memory_limit: MemoryLimit = None,
    prefix_snapshot_interval: PrefixSnapshotInterval = None,
    json_file: JsonFile = None,
) -> None:
    """Measure growing conversations, with the prefix cache and without it."""
    from sidestream.engine.bench.prefix import MultiTurn

    _run(
        MultiTurn(chats=chats, turns=turns, system=system, message=message, answer=answer, concurrency=concurrency),
        model,
        seed=seed,
        device=device,
        cudagraph_mode=cudagraph_mode,
        max_num_batched_tokens=max_num_batched_tokens,
        memory_limit=memory_limit,
        interval=prefix_snapshot_interval,
        json_file=json_file,
    )


def _run(
    workload: SharedPrefix | MultiTurn,
    model: Path | None,
    *,
    seed: int,
    device: str,
    cudagraph_mode: str,
    max_num_batched_tokens: int,
    memory_limit: str | None,
    interval: int | None,
    json_file: Path | None,
) -> None:
    from sidestream.cli.report_file import check_place, write
    from sidestream.config.engine import EngineConfig
    from sidestream.engine.bench.environment import device_name, origin
    from sidestream.engine.bench.model_folder import model_folder
    from sidestream.engine.bench.prefix import compare
    from sidestream.engine.build import build_engine
    from sidestream.engine.llm import bundled_model

    check_place(json_file)
    source = model if model is not None else bundled_model()
    user = EngineConfig(
        device=device,
        load_format="dummy" if source.is_file() else "auto",
        cudagraph_mode=cudagraph_mode,
        max_num_seqs=workload.concurrency,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=workload.longest,
        memory_limit=memory_limit,
        prefix_snapshot_interval=interval,
    )
    with model_folder(source) as (folder, _):
        built = build_engine(folder, user)
    console = Console(highlight=False)
    rows = compare(built, workload, seed=seed, on_row=lambda row: console.print(str(row), markup=False, soft_wrap=True))
    found = {
        "kind": workload.NAME,
        "model": str(source),
        **origin(),
        "device": device_name(built.config.device),
        "workload": asdict(workload) | {"dataset": "random-ids", "seed": seed},
        "rows": [row.as_json() for row in rows],
    }
    write(json_file, found)
