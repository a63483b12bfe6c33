"""Constants are made once where a device outlives the caller, and anew where it does not."""

from __future__ import annotations

import torch

from sidestream.ops.constants import constant
from tests.streams.programs import Machine


@constant
def ramp(device: torch.device, size: int, step: float) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32, device=device).mul_(step)


def test_a_cpu_keeps_them_by_value() -> None:
    like = torch.zeros(1)
    first = ramp(like, 3, 0.5)
    assert first.tolist() == [0.0, 0.5, 1.0]
    assert ramp(torch.ones(2), 3, 0.5) is first
    assert ramp(like, 3, 2.0).tolist() == [0.0, 2.0, 4.0]
    assert ramp(like, 2, 0.5).tolist() == [0.0, 0.5]


def test_what_inference_mode_made_may_be_used_outside() -> None:
    with torch.inference_mode():
        made = ramp(torch.zeros(1), 5, 0.25)
    assert not made.is_inference()


def test_simulated_devices_do_not_share_them() -> None:
    """Also a first use inside a capture is allowed there, since nothing is copied from the host or kept."""
    for _ in range(2):
        m = Machine()
        like = m.buffer(1)
        with m.on_compute():
            with m.streams.capture("whole") as graph:
                made = ramp(like, 3, 0.5) + like
            graph.replay()
        assert m.read(made) == [0.0, 0.5, 1.0]
        m.backend.check()
