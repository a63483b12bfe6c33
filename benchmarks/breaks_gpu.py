"""What an eager break costs on a GPU: host time by its parts, and wall time while the GPU is the bottleneck."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_steps import captured, cycles_per_us, host_us, spin, wall_us
from sidestream.core.eager_break import eager_break_during_capture
from sidestream.streams import Handoff, Stream, Streams
from sidestream.streams.cuda import CudaBackend

BUSY_US = 80.0
"""That each segment keeps the GPU busy, so that the host is ahead."""
ROUNDS = 24
RUNGS = ("launch of a segment", "kernel launch", "external event", "side stream's wait", "publish there", "wait for it")
"""What a break consists of, in order; each rung has all those before it. The fourth completes one handoff, the last
a second one."""
BREAKS = 44


class Ladder:
    """A step of ``BREAKS`` breaks that have the first ``rungs`` parts of a break with two handoffs. The kernel of a
    break changes what nothing else does, so that every rung is in order.

    Args:
        name: unique.
        busy: clock cycles that each segment keeps the GPU busy.
    """

    def __init__(self, streams: Streams, side: Stream, name: str, *, rungs: int, busy: int) -> None:
        self.streams, self.side, self.rungs, self.busy = streams, side, rungs, busy
        self.x, self.y = (torch.zeros(4096, device=streams.backend.device) for _ in range(2))
        streams.backend.synchronize()
        self.handoffs = [
            (
                Handoff(streams, f"{name}, there {i}", producer="segment", consumers=("side stream",)),
                Handoff(streams, f"{name}, back {i}", producer="side stream", consumers=("compute stream",)),
            )
            for i in range(BREAKS)
        ]

    def captured(self, *, full: bool) -> Callable[[], None]:
        """The step, to be run on the compute stream."""
        self.streams.begin_step()
        self.forward()  # loads the kernels
        self.streams.backend.synchronize()
        self.streams.begin_step()
        replay = captured(self.streams, self.forward, full=full)

        def step() -> None:
            self.streams.begin_step()
            replay()

        return step

    def forward(self) -> None:
        for there, back in self.handoffs:
            if self.busy:
                spin(self.busy)
            self.x.add_(1)
            if self.rungs > 2:
                there.publish()
            self.x.add_(1)
            eager_break_during_capture(self.between)(there, back)
        self.x.add_(1)

    def between(self, there: Handoff, back: Handoff) -> None:
        if self.rungs < 4:
            if self.rungs > 1:
                self.y.add_(1)
            return
        with self.streams.backend.use(self.side):
            there.wait()
            self.y.add_(1)
            if self.rungs > 4:
                back.publish()
        if self.rungs > 5:
            back.wait()


@torch.inference_mode()
def breaks(backend: CudaBackend) -> dict[str, Any]:
    """Host time a break by its parts, and wall time that a break adds to a step while the GPU is the bottleneck."""
    streams = Streams(backend)
    side = streams.new_stream("side")
    busy = int(BUSY_US * cycles_per_us())
    with backend.use(streams.compute):
        idle = [
            Ladder(streams, side, f"{rungs} rungs", rungs=rungs, busy=0).captured(full=False)
            for rungs in range(1, len(RUNGS) + 1)
        ]
        bound = {
            (rungs, full): Ladder(
                streams, side, f"{rungs} busy rungs, {'whole' if full else 'in pieces'}", rungs=rungs, busy=busy
            ).captured(full=full)
            for rungs, full in ((1, True), (2, True), (2, False), (4, False), (6, True), (6, False))
        }
        hosts: list[list[float]] = [[] for _ in idle]
        walls: dict[tuple[int, bool], list[float]] = {key: [] for key in bound}
        for _ in range(ROUNDS):
            for run, taken in zip(idle, hosts, strict=True):
                taken.append(host_us(run))
            for key, run in bound.items():
                walls[key].append(wall_us(run, steps=1))
    host = [statistics.median(taken) / BREAKS for taken in hosts]
    wall = {key: statistics.median(taken) / BREAKS for key, taken in walls.items()}
    parts = {name: here - before for name, here, before in zip(RUNGS, host, [0.0, *host], strict=False)}
    for name, us in parts.items():
        print(f"  {name:22} {us:6.2f} us of host time", flush=True)
    totals = {"without a handoff": host[1], "with one handoff": host[3], "with two handoffs": host[5]}
    # With one handoff the side stream never comes back, which one graph does not allow: against the rest of the step.
    added = {
        "without a handoff": wall[2, False] - wall[2, True],
        "with one handoff": wall[4, False] - wall[1, True],
        "with two handoffs": wall[6, False] - wall[6, True],
    }
    for name, us in totals.items():
        print(f"  a break {name}: {us:6.2f} us of host time, adds {added[name]:5.2f} us to a busy GPU", flush=True)
    return {"breaks": BREAKS, "host_us_by_part": parts, "host_us": totals, "added_wall_us": added}
