"""Options of an engine, as every command that starts one has them: one for each field of ``EngineConfig``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from sidestream.cli.option_group import Command, option_group
from sidestream.config.engine import EngineConfig

ENGINE, BATCHES, MEMORY = "Engine", "Batches and graphs", "Memory and caches"

Device = Annotated[
    str,
    typer.Option(
        help="auto (a GPU if there is one), cpu, cuda, or sim: a GPU simulated on the CPU, slow and strict.",
        rich_help_panel=ENGINE,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Of weights and activations: auto (float32 on a CPU, else the checkpoint's), float32 or bfloat16.",
        rich_help_panel=ENGINE,
    ),
]
LoadFormat = Annotated[
    str, typer.Option(help="auto reads the checkpoint; dummy draws seeded random weights.", rich_help_panel=ENGINE)
]
Seed = Annotated[int, typer.Option(help="Of requests that bring none, and of dummy weights.", rich_help_panel=ENGINE)]
MaxFormSeconds = Annotated[
    float,
    typer.Option(
        help="For what generation is held to (a JSON schema, expression, grammar, tools) to be compiled and tried.",
        rich_help_panel=ENGINE,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Longest sequence, prompt and completion, in tokens.",
        show_default="the model's limit, or what the cache holds",
        rich_help_panel=ENGINE,
    ),
]

MaxNumSeqs = Annotated[int, typer.Option(help="Sequences that run at once.", rich_help_panel=BATCHES)]
MaxNumBatchedTokens = Annotated[
    int, typer.Option(help="Tokens a step: decodes and prefill chunks together.", rich_help_panel=BATCHES)
]
PrefillPacing = Annotated[
    bool,
    typer.Option(
        "--prefill-pacing/--no-prefill-pacing",
        help="Let each prompt add no more time to a step than its decodes take alone, so that long ones stall nobody.",
        rich_help_panel=BATCHES,
    ),
]
CudagraphMode = Annotated[
    str,
    typer.Option(
        help="none, piecewise, full, full_and_piecewise, or auto: the last where the device has graphs.",
        rich_help_panel=BATCHES,
    ),
]
MaxCaptureTokens = Annotated[
    int | None,
    typer.Option(
        help="Largest mixed batch with a graph, in tokens.",
        show_default="--max-num-batched-tokens; 16 on sim",
        rich_help_panel=BATCHES,
    ),
]
StreamPolicy = Annotated[
    str,
    typer.Option(
        help="How a wait crosses the boundary of a capture: external events, whole stream waits, or auto.",
        rich_help_panel=BATCHES,
    ),
]
GraphDebug = Annotated[
    bool,
    typer.Option(
        "--graph-debug", help="At every replay check addresses and poison static buffers.", rich_help_panel=BATCHES
    ),
]

MemoryLimit = Annotated[
    str | None,
    typer.Option(
        help="Bytes ('8GiB') or a share of the device's memory ('60%'); on a GPU of all that is in use, context and "
        "graphs included.",
        show_default="60%",
        rich_help_panel=MEMORY,
    ),
]
KvCacheDtype = Annotated[
    str, typer.Option(help="Of KV rows: auto (the engine's dtype), bf16, fp8_ds_mla or mxfp8.", rich_help_panel=MEMORY)
]
BlockSize = Annotated[
    int, typer.Option(help="Tokens a KV block; a multiple of the model's index_kpool.", rich_help_panel=MEMORY)
]
NumBlocks = Annotated[
    int | None,
    typer.Option(help="KV blocks.", show_default="as many as --memory-limit allows", rich_help_panel=MEMORY),
]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--prefix-caching/--no-prefix-caching",
        help="Let prompts take over what others that began alike computed.",
        rich_help_panel=MEMORY,
    ),
]
NumPrefixSnapshots = Annotated[
    int | None,
    typer.Option(
        help="Slots for copies of linear-attention state, which the prefix cache needs.",
        show_default="two for each of --max-num-seqs, at most a tenth of the cache",
        rich_help_panel=MEMORY,
    ),
]
PrefixSnapshotInterval = Annotated[
    int | None,
    typer.Option(
        help="Blocks between such copies within a prompt.",
        show_default="only where prompts end or part",
        rich_help_panel=MEMORY,
    ),
]
HisparseHostMemory = Annotated[
    str | None,
    typer.Option(
        help="Host memory for KV rows that leave a device that is short of room: bytes ('64GiB') or a share of the "
        "machine's ('40%').",
        show_default="none: all rows stay",
        rich_help_panel=MEMORY,
    ),
]
HisparseHotFactor = Annotated[
    int, typer.Option(help="Hot slots a sequence, times the model's index_topk.", rich_help_panel=MEMORY)
]
HisparseWatermark = Annotated[
    float, typer.Option(help="Share of the KV blocks, 0 to 1, kept free ahead of need.", rich_help_panel=MEMORY)
]
HisparseStagedTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens of context that the prefills of one step may have in the host pool.",
        show_default="two of the longest sequences",
        rich_help_panel=MEMORY,
    ),
]

OPTIONS: dict[str, Any] = {
    "device": Device,
    "dtype": Dtype,
    "load_format": LoadFormat,
    "seed": Seed,
    "max_model_len": MaxModelLen,
    "max_num_seqs": MaxNumSeqs,
    "max_num_batched_tokens": MaxNumBatchedTokens,
    "prefill_pacing": PrefillPacing,
    "cudagraph_mode": CudagraphMode,
    "max_capture_tokens": MaxCaptureTokens,
    "stream_policy": StreamPolicy,
    "graph_debug": GraphDebug,
    "memory_limit": MemoryLimit,
    "kv_cache_dtype": KvCacheDtype,
    "block_size": BlockSize,
    "num_blocks": NumBlocks,
    "enable_prefix_caching": PrefixCaching,
    "num_prefix_snapshots": NumPrefixSnapshots,
    "prefix_snapshot_interval": PrefixSnapshotInterval,
    "hisparse_host_memory": HisparseHostMemory,
    "hisparse_hot_factor": HisparseHotFactor,
    "hisparse_watermark": HisparseWatermark,
    "hisparse_staged_tokens": HisparseStagedTokens,
    "max_form_seconds": MaxFormSeconds,
}
"""In the order of ``--help``."""


def engine_options(*without: str, **defaults: Any) -> Callable[[Command], Command]:
    """A command's keyword ``engine`` is an ``EngineConfig`` of all options but these."""
    options = {name: option for name, option in OPTIONS.items() if name not in without}
    return option_group("engine", EngineConfig, options, defaults)
