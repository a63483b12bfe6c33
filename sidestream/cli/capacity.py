"""``sidestream capacity``: what fits a machine, with and without a host pool."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from sidestream.errors import ConfigError

if TYPE_CHECKING:
    from sidestream.engine.capacity import Capacity, CapacitySettings

HELP = """
Count how many tokens and requests fit, from a model's config alone.

With a host pool (HiSparse) KV rows need not be on the device: index keys, the state of linear attention and hot slots
do. What decode then pays is the bus: rows that a step selects and the last one did not. The table shows that time for
one request at several overlaps between steps; work that the step does meanwhile hides it.

**Examples**

- `sidestream capacity path/to/checkpoint --context 131072`
- `sidestream capacity config.json --device-memory 141GB --host-memory 512GiB --kv-cache-dtype mxfp8 --devices 8`
"""
ANY = 1 << 62


def capacity(
    model: Annotated[Path, typer.Argument(help="Folder of a checkpoint, or a config.json.")],
    context: Annotated[int, typer.Option(help="Tokens of every request.")] = 32768,
    device_memory: Annotated[str, typer.Option(help="Of one device, in bytes: '141GB'.")] = "141GB",
    host_memory: Annotated[str, typer.Option(help="Of the host pool, in bytes: '256GiB'.")] = "256GiB",
    devices: Annotated[int, typer.Option(help="Weights are split over so many; each holds all caches.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, bf16, fp8_ds_mla or mxfp8.")] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens a KV block.")] = 64,
    hot_factor: Annotated[int, typer.Option(help="Hot slots a sequence, times index_topk.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    from sidestream.config.model import ModelConfig
    from sidestream.engine.capacity import CapacitySettings
    from sidestream.engine.capacity import capacity as count

    settings = CapacitySettings(
        device_memory=_bytes("device_memory", device_memory),
        host_memory=_bytes("host_memory", host_memory),
        context=context,
        devices=devices,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        hot_factor=hot_factor,
    )
    found = count(ModelConfig.from_hf(model), settings)
    if as_json:
        sys.stdout.write(json.dumps(found.as_json(), indent=2) + "\n")
        return
    console = Console(highlight=False)
    for line in facts(found):
        console.print(line, style="dim", soft_wrap=True, markup=False)
    console.print(table(found, settings))


capacity.__doc__ = HELP


def _bytes(name: str, text: str) -> int:
    """Of '141GB' or an integer; a share would be of nothing."""
    from sidestream.config.resolved import parse_memory

    if "%" in text or not (text.strip().isdigit() or text.strip()[-1:].isalpha()):
        raise ConfigError(f"{name} is {text!r}; give bytes, such as '141GB'")
    return parse_memory(text, ANY, name=name)


def facts(found: Capacity) -> list[str]:
    """Sizes that the table follows from."""
    sizes = (
        f"weights {found.weights / 1e9:,.1f} GB a device; a token: {found.kv_per_token:,.0f} B of KV rows, "
        f"{found.index_keys_per_token:,.0f} B of index keys; a sequence: {found.state_per_sequence / 1e6:,.1f} MB of "
        f"state, {found.hot_per_sequence / 1e6:,.1f} MB of hot slots with a host pool"
    )
    lines = [sizes]
    for overlap, ms in found.bus_ms.items():
        lines.append(f"{overlap:.0%} of a selection as the step before: {ms:.2f} ms of the bus a step and request")
    return lines


def table(found: Capacity, settings: CapacitySettings) -> Table:
    made = Table()
    for name in ("", f"requests of {settings.context:,} tokens", "tokens", "first to run out"):
        made.add_column(name, overflow="fold")
    resident, hosted = found.resident, found.hosted
    made.add_row("all on the device", f"{resident.requests:,}", f"{resident.tokens:,}", resident.limit)
    if hosted is None:
        made.add_row("with a host pool", "-", "-", "layers read their whole context: nothing is cold")
    else:
        made.add_row("with a host pool", f"{hosted.requests:,}", f"{hosted.tokens:,}", hosted.limit)
    return made
