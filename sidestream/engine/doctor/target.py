"""The device that is diagnosed: which one, why, and how to get a fresh backend of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sidestream.engine.doctor.report import DeviceChoice
from sidestream.streams import InlineBackend, StreamBackend


@dataclass(frozen=True, slots=True)
class Target:
    """A device to diagnose.

    Attributes:
        device: "cpu", "cuda" or "sim".
        reason: why this one.
        make_backend: the device that has streams, events and graphs; the simulated one where ``device`` has none.
            Raises ``ConfigError`` if it is not there.
        make_engine_backend: the device that the engine would run on.
        spin: keeps the current stream busy for that many clock cycles; does nothing where that says nothing.
    """

    device: str
    reason: str
    make_backend: Callable[[], StreamBackend]
    make_engine_backend: Callable[[], StreamBackend]
    spin: Callable[[int], None]

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


def choose_target(choice: DeviceChoice) -> Target:
    """The device for a user's choice; ``auto`` takes a GPU where there is one, as the engine does."""
    asked = choice is not DeviceChoice.AUTO
    if choice is DeviceChoice.CUDA or (not asked and torch.cuda.is_available()):
        return Target("cuda", "asked for" if asked else "torch sees a GPU", _cuda, _cuda, _cuda_spin)
    if choice is DeviceChoice.SIM:
        reason = "asked for; it checks the order of streams, and the engine itself would run on the CPU"
        return Target("sim", reason, _simulated, InlineBackend, _no_spin)
    return Target("cpu", "asked for" if asked else "torch sees no GPU", _simulated, InlineBackend, _no_spin)


def _cuda() -> StreamBackend:
    from sidestream.streams.cuda import CudaBackend

    return CudaBackend()


def _simulated() -> StreamBackend:
    from sidestream.streams.simulated import Order, SimulatedBackend

    # Nothing runs before it is waited for, so what a wait covers shows in what has run after it.
    return SimulatedBackend(Order.LAZY)


def _cuda_spin(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _no_spin(cycles: int) -> None:
    pass
