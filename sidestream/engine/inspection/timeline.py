"""A profiler's trace of one step as lanes: streams of a GPU, or the host's thread where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_KIND = "cpu_op"


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of work: microseconds from the first one's begin."""

    name: str
    begin: float
    length: float


@dataclass(frozen=True, slots=True)
class Lane:
    """Work of one stream or thread, in order of begin; spans do not overlap."""

    name: str
    spans: tuple[Span, ...]

    @property
    def busy(self) -> float:
        """Microseconds."""
        return sum(span.length for span in self.spans)


def trace_step(step: Callable[[], object], device: str, path: Path, *, settle: Callable[[], None]) -> list[Lane]:
    """Run a step under the profiler and write its Chrome trace to ``path``; ``settle`` waits for the device."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiler:
        step()
        settle()
    profiler.export_chrome_trace(str(path))
    return lanes_of(json.loads(path.read_text()))


def lanes_of(trace: dict[str, Any]) -> list[Lane]:
    """Lanes of a Chrome trace: of its device work if there is any, else of the host's outermost operators."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    chosen = [event for event in events if event.get("cat") in DEVICE_KINDS]
    label = "stream"
    if not chosen:
        chosen, label = [event for event in events if event.get("cat") == HOST_KIND], "host thread"
    if not chosen:
        return []
    origin = min(event["ts"] for event in chosen)
    by_lane: dict[Any, list[dict[str, Any]]] = {}
    for event in sorted(chosen, key=lambda event: (event["ts"], -event["dur"])):
        by_lane.setdefault(event["tid"], []).append(event)
    return [Lane(f"{label} {lane}", _outermost(found, origin)) for lane, found in sorted(by_lane.items(), key=_first)]


def _first(item: tuple[Any, list[dict[str, Any]]]) -> float:
    return float(item[1][0]["ts"])


def _outermost(events: list[dict[str, Any]], origin: float) -> tuple[Span, ...]:
    """Operators call operators: those within another are left out."""
    spans: list[Span] = []
    end = float("-inf")
    for event in events:
        if event["ts"] >= end:
            spans.append(Span(str(event["name"]), event["ts"] - origin, float(event["dur"])))
            end = event["ts"] + event["dur"]
    return tuple(spans)
