"""``sidestream capacity``: what fits a machine, with and without a host pool."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from sidestream.config.memory_size import parse_size
from sidestream.engine.bundled import bundled_model, known_configs
from sidestream.errors import ConfigError

if TYPE_CHECKING:
    from sidestream.engine.capacity import Capacity, CapacitySettings

HELP = """
Count how many tokens and requests fit, from a model's config alone.

With a host pool (HiSparse) KV rows need not be on the device: index keys, the state of linear attention and hot slots
do. What decode then pays is the bus: rows that a step selects and the last one did not. A line above the table gives
that time for one request at several overlaps between steps; work that the step does meanwhile hides it.

Configs of published models ship under the names deepseek-v3.2, glm-5.2, glm-5.3-flash and kimi-linear-48b, as their
makers published them, with the defaults of transformers where they say nothing. Weights are counted in `--dtype`,
whatever a checkpoint stores.

**Examples**

- `sidestream capacity` counts for the checkpoint that ships with Sidestream
- `sidestream capacity deepseek-v3.2 --devices 16 --device-memory 141GB`
- `sidestream capacity path/to/checkpoint --context 131072 --host-memory 0`
- `sidestream capacity config.json --host-memory 1TiB --kv-cache-dtype mxfp8 --devices 8`
"""
DEFAULT_CONTEXT = 32768
LEAST_DEVICE = 1 << 20
"""Bytes; a number without a unit below it was not meant as bytes."""


def capacity(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder of a checkpoint, a config.json, or the name of a model.", show_default="the bundled one"
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of every request.", show_default=f"{DEFAULT_CONTEXT}, or the model's limit"),
    ] = None,
    device_memory: Annotated[
        str, typer.Option("--device-memory", "--memory", help="Of one device, with a unit: '141GB'.")
    ] = "141GB",
    host_memory: Annotated[str, typer.Option(help="Of the host pool, with a unit: '256GiB'; 0 is no pool.")] = "256GiB",
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

    config = ModelConfig.from_hf(bundled_model() if model is None else _config_of(model))
    settings = CapacitySettings(
        device_memory=_bytes("device_memory", device_memory, least=LEAST_DEVICE),
        host_memory=_bytes("host_memory", host_memory, least=0),
        context=min(DEFAULT_CONTEXT, config.max_position_embeddings) if context is None else context,
        devices=devices,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        hot_factor=hot_factor,
    )
    found = count(config, settings)
    if as_json:
        sys.stdout.write(json.dumps(found.as_json(), indent=2) + "\n")
        return
    console = Console(highlight=False)
    for line in facts(found, settings):
        console.print(line, style="dim", soft_wrap=True, markup=False)
    console.print(table(found, settings))


capacity.__doc__ = HELP


def _config_of(model: str) -> Path:
    """The config of a folder or file, or of a model known by name."""
    path, known = Path(model).expanduser(), known_configs()
    if path.exists():
        return path
    if found := known.get(model.lower()):
        return found
    raise ConfigError(f"model {model!r} is no folder and no file here, and none of the names {', '.join(known)}")


def _bytes(name: str, text: str, *, least: int) -> int:
    """Of '141GB'. A small number without a unit was not meant as bytes, unless it is 0."""
    knob = f"{name} (--{name.replace('_', '-')})"
    size = parse_size(text, knob=knob)
    if text.strip().isdigit() and 0 < size < LEAST_DEVICE:
        raise ConfigError(f"{knob} is {text!r}, which is {size} bytes; give a unit, such as '{size}GB'")
    if size < least:
        raise ConfigError(f"{knob} is {text!r}, which is {size} bytes; at least {least} are needed")
    return size


def facts(found: Capacity, settings: CapacitySettings) -> list[str]:
    """Sizes that the table follows from."""
    sizes = (
        f"weights {found.weights / 1e9:,.1f} GB a device; a token: {found.kv_per_token:,.0f} B of KV rows, "
        f"{found.index_keys_per_token:,.0f} B of index keys; a sequence: {found.state_per_sequence / 1e6:,.1f} MB "
        "of state"
    )
    if found.hosted is not None:
        sizes += f", {found.hot_per_sequence / 1e6:,.1f} MB of hot slots with a host pool"
    lines = [sizes]
    if found.least_devices > settings.devices:
        count = "1 device" if settings.devices == 1 else f"{settings.devices} devices"
        lines.append(
            f"the weights do not fit {count} of {settings.device_memory / 1e9:,.0f} GB; split over --devices "
            f"{found.least_devices} they would"
        )
    if found.bus_ms:
        times = ", ".join(f"{_time(ms)} if {overlap:.0%}" for overlap, ms in found.bus_ms.items())
        lines.append(
            "with a host pool, a decode step copies for each request the rows that the step before did not select: "
            f"{times} of its tokens are the same"
        )
    return lines


def _time(ms: float) -> str:
    return f"{ms:.2f} ms" if ms >= 0.1 else f"{1000 * ms:.2g} us"


def table(found: Capacity, settings: CapacitySettings) -> Table:
    made = Table()
    for name in ("", f"requests of {settings.context:,} tokens", "tokens", "first to run out"):
        made.add_column(name, overflow="fold")
    resident, hosted = found.resident, found.hosted
    made.add_row("all on the device", f"{resident.requests:,}", f"{resident.tokens:,}", resident.limit)
    if not settings.host_memory:
        return made
    if hosted is None:
        made.add_row("with a host pool", "-", "-", "layers read their whole context: nothing is cold")
    else:
        made.add_row("with a host pool", f"{hosted.requests:,}", f"{hosted.tokens:,}", hosted.limit)
    return made
