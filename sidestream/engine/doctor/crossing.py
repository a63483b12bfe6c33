"""What happens to an event that crosses the boundary of a capture, and which policy for waits follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from sidestream.engine.doctor.report import Finding, Probe, Status, first_line
from sidestream.engine.doctor.target import Target
from sidestream.streams import Handoff, Policy, StreamBackend, Streams

SECTION = "events"
SPIN = 20_000_000
"""Clock cycles, about 10 ms: long enough that a missing wait reads the old value."""
TRIES = 3


def probes(target: Target) -> list[Probe]:
    """Questions about events, asked of the simulated device where the target has none."""
    asks = {
        "internal_event_across_capture": internal_event,
        "external_event_across_capture": external_event,
        "wait_covers": wait_covers,
        "stream_policy": stream_policy,
    }
    return [Probe(SECTION, name, partial(ask, target), simulated=not target.on_gpu) for name, ask in asks.items()]


def device_works(target: Target) -> Finding:
    """Memory can be had, a kernel runs and its result comes back."""
    backend = target.make_backend() if target.device != "cpu" else target.make_engine_backend()
    total = float((torch.ones(8, device=backend.device) * 2).cpu().sum())
    backend.synchronize()
    assert total == 16.0, f"8 times 2 gave {total}"
    return Finding("yes", "a kernel ran and its result came back")


@dataclass(frozen=True, slots=True, eq=False)
class _Bench:
    """One device with a compute stream, a side stream and what a crossing needs."""

    backend: StreamBackend
    streams: Streams

    @classmethod
    def of(cls, target: Target) -> _Bench:
        backend = target.make_backend()
        bench = cls(backend, Streams(backend))
        with backend.use(bench.streams.compute):  # the first use of a kernel loads it, which a capture does not allow
            warm = bench.buffer()
            warm.fill_(1).copy_(warm * 2)
            target.spin(1)
        backend.synchronize()
        bench.streams.begin_step()
        return bench

    def buffer(self) -> torch.Tensor:
        made = torch.zeros(1 << 16, device=self.backend.device)
        self.backend.synchronize()
        return made

    def holds(self, tensor: torch.Tensor, value: float) -> bool:
        self.backend.synchronize()
        return bool((tensor.cpu() == value).all())


def internal_event(target: Target) -> Finding:
    """Record an internal event in a capture and wait on it outside, with nothing in between to mend it."""
    bench = _Bench.of(target)
    backend, streams = bench.backend, bench.streams
    side, x, event = streams.new_stream("side"), bench.buffer(), backend.new_event(external=False)
    with backend.use(streams.compute):
        with streams.capture("segment") as segment:
            x.fill_(1)
            backend.record(event)
        segment.replay()
    try:
        with backend.use(side):
            backend.wait(event)
    except RuntimeError as error:
        return Finding("refused", first_line(error))
    finally:
        backend.synchronize()
    return Finding("accepted", "no error; whether such a wait holds anything back is not known")


def external_event(target: Target) -> Finding:
    """Publish in a capture and wait in the eager code behind it: the consumer must read each step's own value."""
    bench = _Bench.of(target)
    backend, streams = bench.backend, bench.streams
    if backend.external_events is not None:
        return Finding(None, backend.external_events, status=Status.MISSING)
    ready = Handoff(streams, "ready", producer="segment", consumers=("side stream",))
    back = Handoff(streams, "back", producer="side stream", consumers=("compute stream",))
    side, (n, x, y) = streams.new_stream("side"), (bench.buffer() for _ in range(3))
    with backend.use(streams.compute), streams.capture("segment") as segment:
        target.spin(SPIN)
        x.copy_(n)
        ready.publish()
    for value in range(1, TRIES + 1):
        streams.begin_step()
        with backend.use(streams.compute):
            n.fill_(value)
            segment.replay()
            with backend.use(side):
                ready.wait()
                y.copy_(x)
                back.publish()
            back.wait()
        if not bench.holds(y, value):
            return Finding("wrong values", f"step {value} of {TRIES} did not read what the segment wrote in it")
    return Finding("works", f"{TRIES} replays, each read what the segment wrote before the publish")


def wait_covers(target: Target) -> Finding:
    """Whether the side stream is done while the segment that published still runs.

    No clock decides. To see it ahead once proves it; the host may be late to look, hence several tries.
    """
    bench = _Bench.of(target)
    backend, streams = bench.backend, bench.streams
    ready = Handoff(streams, "ready", producer="segment", consumers=("side stream",))
    side, (n, x, y, slow) = streams.new_stream("side"), (bench.buffer() for _ in range(4))
    end, read = backend.new_event(external=False), backend.new_event(external=False)
    with backend.use(streams.compute), streams.capture("segment") as segment:
        target.spin(SPIN)
        x.copy_(n)
        ready.publish()
        target.spin(10 * SPIN)
        slow.fill_(1)
    ahead = False
    for value in range(1, TRIES + 1):
        streams.begin_step()
        with backend.use(streams.compute):
            n.fill_(value)
            segment.replay()
            backend.record(end)
        with backend.use(side):
            ready.wait()
            y.copy_(x)
            backend.record(read)
        backend.synchronize_event(read)
        ahead = ahead or not backend.event_done(end)
        if not bench.holds(y, value):
            return Finding("nothing", f"step {value} of {TRIES} did not read what the segment wrote in it")
    if ahead:
        return Finding("what came before the publish", "the side stream was done while the segment still ran")
    by_choice = streams.report.policy is Policy.STREAM
    reason = f"policy {streams.report.policy.value}" if by_choice else f"in {TRIES} tries the segment ended first"
    return Finding("the whole stream", reason)


def stream_policy(target: Target) -> Finding:
    """What ``Streams`` chooses for this device."""
    report = Streams(target.make_backend()).report
    return Finding(report.policy.value, report.reason)
