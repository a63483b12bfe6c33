"""One step of a device out of a profiler's trace: what ran when, and how much of the copies ran beside other work."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Event = dict[str, Any]
"""Of a Chrome trace, complete ("X"): name, ts and dur in microseconds, cat, tid."""

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
GAP_US = 500.0
"""Nothing runs for longer than this between two steps, and for less within one."""
ROLES = (
    ("rows from the host", ("_copy_rows",)),
    ("residency", ("_resolve_kernel", "_resolve_once_kernel")),
    ("blocks that move", ("Memcpy DtoH", "Memcpy HtoD")),
)
"""Role of an event by parts of its name; all others compute."""


def role(event: Event) -> str:
    for name, parts in ROLES:
        if any(part in event["name"] for part in parts):
            return name
    return "compute"


def record(step: Callable[[], object], *, on_gpu: bool, steps: int = 6) -> list[Event]:
    """Profile some steps with pauses between them; the device's events of the one of median length, from 0 on. Where
    there is no GPU, operators of the host stand for kernels."""
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as profiler:  # without, torch 2.11 warns
        for _ in range(steps):
            step()
            if on_gpu:
                torch.cuda.synchronize()
            time.sleep(4 * GAP_US * 1e-6)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    wanted = ON_DEVICE if on_gpu else ("cpu_op",)
    kept = [
        {"name": e["name"][:80], "ph": "X", "ts": e["ts"], "dur": e["dur"], "cat": e["cat"], "pid": 0, "tid": e["tid"]}
        for e in events
        if e.get("ph") == "X" and e.get("cat") in wanted
    ]
    found = steps_of(kept)
    if not found:
        return []
    lengths = [span(events) for events in found]
    return from_zero(found[lengths.index(statistics.median_high(lengths))])


def steps_of(events: Sequence[Event]) -> list[list[Event]]:
    """Events in order, cut where nothing runs for ``GAP_US``; pieces of as many events as most have."""
    pieces: list[list[Event]] = []
    end = float("-inf")
    for event in sorted(events, key=lambda event: float(event["ts"])):
        if event["ts"] - end > GAP_US:
            pieces.append([])
        pieces[-1].append(event)
        end = max(end, event["ts"] + event["dur"])
    sizes = [len(piece) for piece in pieces]
    usual = max(sizes, key=lambda size: (sizes.count(size), size), default=0)
    return [piece for piece in pieces if len(piece) == usual]


def from_zero(events: Sequence[Event]) -> list[Event]:
    first = min(event["ts"] for event in events)
    return [event | {"ts": round(event["ts"] - first, 3)} for event in events]


def span(events: Sequence[Event]) -> float:
    """Microseconds from the first beginning to the last end."""
    return max(float(e["ts"] + e["dur"]) for e in events) - min(float(e["ts"]) for e in events)


def copies(events: Sequence[Event]) -> dict[str, float]:
    """Milliseconds in which rows were copied, and the share of them in which something computed as well.

    A kernel that was launched early has begun while it still waits for the one before: such time counts once.
    """
    rows, busy = (
        union([(e["ts"], e["ts"] + e["dur"]) for e in events if role(e) == wanted])
        for wanted in (ROLES[0][0], "compute")
    )
    total = sum(end - begin for begin, end in rows)
    beside = sum(max(0.0, min(b, d) - max(a, c)) for a, b in rows for c, d in busy)
    return {"copy_ms": total / 1e3, "copy_beside_compute": beside / total if total else 1.0, "step_us": span(events)}


def union(pieces: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals that cover the same."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(pieces):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def write(path: Path, events: Sequence[Event], what: dict[str, Any]) -> None:
    """As a Chrome trace that says what it is of."""
    path.write_text(json.dumps({"traceEvents": list(events), "otherData": what}) + "\n")
