"""The memory ledger: every part of what an engine holds, as foreseen and as it came, beside the device's own figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from sidestream.engine.device_memory import DeviceMemory

MIB = 2**20

WEIGHTS = "weights"
CONTEXT = "CUDA context"
LIBRARIES = "kernels and libraries"
FIXED = "index groups and uploads"
KEPT = "workspaces and constants"
ACTIVATIONS = "activations"
STATIC = "static buffers"
GRAPHS = "graph pool"
SLACK = "allocator slack"
RESERVE = "reserve"


@dataclass(frozen=True, slots=True)
class LedgerPart:
    """One kind of memory, in bytes.

    Attributes:
        predicted: before the weights were loaded; the caches were sized by it.
        measured: when the engine was ready.
    """

    name: str
    predicted: int
    measured: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """Bytes that the engine holds, by part.

    Attributes:
        parts: on the device that computes; together at most the budget.
        pinned: page-locked memory of the host, outside of the budget.
        budget: ``memory_limit`` in bytes.
        in_use: by the device's own account: on a GPU what the driver says is in use, context included; on a CPU what
            the process has resident, which pools join when they are first written.
        limit_is_whole: the budget bounds ``in_use`` itself, not only the weights and caches.
    """

    parts: tuple[LedgerPart, ...]
    budget: int
    in_use: int
    pinned: int = 0
    limit_is_whole: bool = False

    @classmethod
    def of(
        cls,
        predicted: Mapping[str, int],
        measured: Mapping[str, int],
        *,
        budget: int,
        memory: DeviceMemory | None = None,
    ) -> Ledger:
        """Of bytes by name; ``memory`` of a CUDA device, if that is where they are."""
        parts = tuple(
            LedgerPart(name, predicted.get(name, 0), measured.get(name, 0)) for name in {**measured, **predicted}
        )
        pinned = 0 if memory is None else memory.pinned()
        return cls(parts, budget, in_use(memory), pinned, memory is not None)

    @property
    def total(self) -> int:
        """Of the measured parts."""
        return sum(part.measured for part in self.parts)

    @property
    def predicted(self) -> int:
        return sum(part.predicted for part in self.parts)

    def bytes_of(self, name: str) -> int:
        """Measured bytes of one part; 0 if there is no such part."""
        return sum(part.measured for part in self.parts if part.name == name)

    def as_json(self) -> dict[str, Any]:
        """Plain data, in bytes."""
        return {
            "parts": {part.name: {"predicted": part.predicted, "measured": part.measured} for part in self.parts},
            "predicted": self.predicted,
            "measured": self.total,
            "in_use": self.in_use,
            "budget": self.budget,
            "pinned": self.pinned,
        }

    def __str__(self) -> str:
        """A table in MiB."""
        lines = [f"{'MiB':32}{'predicted':>12}{'measured':>12}"]
        rows = [*self.parts, LedgerPart("total", self.predicted, self.total)]
        lines += [f"{row.name:32}{row.predicted / MIB:12.1f}{row.measured / MIB:12.1f}" for row in rows]
        account = "in use, says the driver" if self.limit_is_whole else "resident, says the system"
        lines += [f"{name:32}{'':12}{value / MIB:12.1f}" for name, value in ((account, self.in_use),)]
        lines += [f"{'memory_limit':32}{'':12}{self.budget / MIB:12.1f}"]
        if self.pinned:
            lines += [f"{'page-locked on the host, beside':32}{'':12}{self.pinned / MIB:12.1f}"]
        return "\n".join(lines)


def in_use(memory: DeviceMemory | None) -> int:
    """The driver's figure for a CUDA device; without one what this process has resident."""
    return memory.in_use() if memory is not None else int(psutil.Process().memory_info().rss)
