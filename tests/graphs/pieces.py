"""What the tests of breakable captures share: a small model of three breaks' worth of work, and how to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from sidestream.core.eager_break import eager_break_during_capture
from sidestream.graphs.breakable import BreakableCUDAGraphCapture
from tests.streams.programs import Machine


def break_here(body: Callable[[], object], name: str) -> None:
    """An eager break of the given name; what ``body`` returns is dropped."""

    def run() -> None:
        body()

    eager_break_during_capture(run, name=name)()


@dataclass(eq=False)
class Pieces:
    """Segment, break, segment, break, segment over one input.

    Attributes:
        seen: what the two breaks read of the segments' results, at capture and at every replay. Reading is a host
            synchronisation, which no segment could do.
    """

    machine: Machine
    seen: list[tuple[str, float]] = field(default_factory=list)
    given: torch.Tensor = field(init=False)
    doubled: torch.Tensor = field(init=False)
    raised: torch.Tensor = field(init=False)
    result: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.given, self.doubled, self.raised, self.result = (self.machine.buffer(4) for _ in range(4))

    def forward(self) -> None:
        """result = (2 * given + 1) * 10, in three segments."""
        self.doubled.copy_(self.given * 2)
        break_here(self.raise_it, "raise")
        self.result.copy_(self.raised * 10)
        break_here(self.look, "look")
        self.given.mul_(1)

    def raise_it(self) -> None:
        self.seen.append(("raise", self.doubled[0].item()))
        self.raised.copy_(self.doubled + 1)

    def look(self) -> None:
        self.seen.append(("look", self.result[0].item()))

    def capture(self, value: float, **arguments: object) -> BreakableCUDAGraphCapture:
        """Captured on the compute stream with ``given`` at ``value``."""
        with self.machine.on_compute():
            self.given.fill_(value)
            with BreakableCUDAGraphCapture(self.machine.streams, "pieces", **arguments) as pieces:  # type: ignore[arg-type]
                self.forward()
        return pieces
