"""What the GPU tests of streams share: one GPU with its streams, and work that takes long enough to be seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from sidestream.streams import Handoff, Policy, Stream, Streams
from sidestream.streams.cuda import CudaBackend

SPIN = 20_000_000
"""Clock cycles, about 10 ms: long enough that a missing wait reads the old value every time."""
N = 1 << 16


def spin(cycles: int) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def plain_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


@dataclass(eq=False)
class Machine:
    policy: Policy | None = None
    backend: CudaBackend = field(init=False)
    streams: Streams = field(init=False)
    side: Stream = field(init=False)

    def __post_init__(self) -> None:
        self.backend = CudaBackend()
        self.streams = Streams(self.backend, policy=self.policy)
        self.side = self.streams.new_stream("side")
        self.streams.begin_step()
        # The first use of a kernel loads it, which may wait for work that runs, and so hide that nothing else does.
        with self.on_compute():
            warm = self.buffer()
            warm.fill_(1).copy_(warm * 2)
            spin(1)
        self.backend.synchronize()

    def on_compute(self) -> Any:
        return self.backend.use(self.streams.compute)

    def on_side(self) -> Any:
        return self.backend.use(self.side)

    def handoff(self, name: str = "topk_ready") -> Handoff:
        return Handoff(self.streams, name, producer="indexer", consumers=("conversion",))

    def buffer(self) -> torch.Tensor:
        made = torch.zeros(N, device=self.backend.device)
        self.backend.synchronize()
        return made

    def value(self, tensor: torch.Tensor) -> float:
        """The one value that the buffer holds."""
        self.backend.synchronize()
        low, high = tensor.aminmax()
        assert low.item() == high.item(), (low.item(), high.item())
        return float(low.item())
