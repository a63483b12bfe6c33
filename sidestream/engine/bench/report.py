"""What a latency benchmark found, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sidestream.engine.bench.environment import device_name, origin
from sidestream.engine.bench.latency import DecodeTimes, PrefillTimes
from sidestream.engine.build import BuiltEngine


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
            "kind": "latency",
            "model": self.model,
            **origin(),
            "command": self.command,
            "device": device_name(config.device),
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
