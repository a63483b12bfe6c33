"""What a latency benchmark found, as plain data: for table and JSON, and for comparing two of them."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sidestream import __version__
from sidestream.engine.bench.latency import DecodeTimes, PrefillTimes
from sidestream.engine.build import BuiltEngine
from sidestream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LatencyReport:
    """One run.

    Attributes:
        model: what was measured, for people.
        read_rate: bytes a second of the floors.
    """

    model: str
    command: str
    engine: BuiltEngine
    read_rate: float
    decode: tuple[DecodeTimes, ...]
    prefill: tuple[PrefillTimes, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data; times in ms where a name says nothing else, bytes elsewhere."""
        config = self.engine.config
        return {
            "model": self.model,
            "command": self.command,
            "date": time.strftime("%Y-%m-%d"),
            "device": device_name(config.device),
            "versions": versions(),
            "mode": config.cudagraph_mode,
            "dtype": config.dtype,
            "kv_cache_dtype": config.kv_cache_dtype,
            "read_rate": self.read_rate,
            "startup_s": dict(self.engine.startup),
            "compiled_after_ready": list(self.engine.compiled_after_ready()),
            "ledger": self.engine.ledger_now().as_json(),
            "decode": [row.as_json() for row in self.decode],
            "prefill": [row.as_json() for row in self.prefill],
        }


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure in two reports; above 1 the second is slower."""

    name: str
    first: float
    second: float
    unit: str
    slower: float


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[Ratio, ...]:
    """What both reports measured.

    Raises:
        ConfigError: they have nothing in common, or are no reports.
    """
    both = (first, second)
    try:
        a, b = ({(row["batch"], row["context"]): float(row["median"]) for row in r["decode"]} for r in both)
        x, y = ({row["tokens"]: float(row["tokens_per_s"]) for row in r["prefill"]} for r in both)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"not a report of `sidestream bench latency --json`: {error!r}") from None
    found = [Ratio(f"batch {k[0]}, context {k[1]}", a[k], b[k], "ms", b[k] / a[k]) for k in a if k in b]
    found += [Ratio(f"prefill of {k}", x[k], y[k], "tokens/s", x[k] / y[k]) for k in x if k in y]
    if not found:
        raise ConfigError("the two reports measured no batch, context or prompt in common")
    return tuple(found)


def versions() -> dict[str, str]:
    """Of what decides speed."""
    return {"sidestream": __version__, "torch": torch.__version__, "python": platform.python_version()}


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
