"""What the tests of streams share: a device with its streams, and values that say whether a wait was missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sidestream.streams import Handoff, Policy, Stream, Streams
from sidestream.streams.simulated import Order, SimulatedBackend

ORDERS = (
    (Order.INLINE, 0, None),
    (Order.LAZY, 0, None),
    (Order.RANDOM, 0, None),
    (Order.RANDOM, 1, None),
    (Order.STARVED, 0, "side"),
    (Order.STARVED, 0, "compute"),
)


@dataclass(eq=False)
class Machine:
    """A simulated device, its compute stream and one side stream; the first step has begun."""

    order: Order = Order.LAZY
    seed: int = 0
    starved: str | None = None
    policy: Policy | None = None
    backend: SimulatedBackend = field(init=False)
    streams: Streams = field(init=False)
    side: Stream = field(init=False)

    def __post_init__(self) -> None:
        self.backend = SimulatedBackend(self.order, seed=self.seed, starved=self.starved)
        self.streams = Streams(self.backend, policy=self.policy)
        self.side = self.streams.new_stream("side")
        self.streams.begin_step()

    def on_compute(self) -> Any:
        return self.backend.use(self.streams.compute)

    def on_side(self) -> Any:
        return self.backend.use(self.side)

    def handoff(self, name: str = "topk_ready", consumers: Sequence[str] = ("conversion",)) -> Handoff:
        return Handoff(self.streams, name, producer="indexer", consumers=consumers)

    def buffer(self, *shape: int, value: float = 0.0) -> torch.Tensor:
        """A persistent buffer, settled before the test begins."""
        made = torch.full(shape, float(value), device="sim")
        self.backend.synchronize()
        return made

    def read(self, tensor: torch.Tensor) -> list[Any]:
        """Values, after everything has run."""
        self.backend.synchronize()
        values: list[Any] = tensor.tolist()
        return values
