"""Draws a step from a trace that ``benchmarks/hisparse_gpu.py`` recorded: what was computed while rows were copied.

PYTHONPATH=. python scripts/trace_timeline.py benchmarks/results/NAME.trace.json docs/hisparse-timeline.svg

Above the whole step, below it what surrounds the first copy of rows, kernel by kernel.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.step_trace import ROLES, Event, copies, from_zero, role, span

LANES = ("compute", *(name for name, _ in ROLES))
COLORS = {"compute": "#8fb4dc", "rows from the host": "#f9b36b", "residency": "#c8a2d8", "blocks that move": "#9bcf93"}
WIDTH, LEFT, RIGHT, TOP, LANE, BAR = 1100, 150, 24, 64, 34, 26
"""Pixels: of the drawing, room beside the lanes and above them, a lane's height, a bar's."""
LETTER = 7.5
"""Pixels that a letter takes at most."""
START_GAP_US = 100.0
"""Under a profiler a step's inputs arrive so long before its graph is launched; what is drawn begins with the graph."""
BEFORE_US, BEHIND_US = 110.0, 90.0
"""Of the lower half: from so long before residency to so long behind the copy."""
TICKS_US = (10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6, 1e9)
KERNELS = (
    ("nvjet", "GEMM"),
    ("_gate_up", "experts"),
    ("_down", "experts"),
    ("_scores_kernel", "index scores"),
    ("_select_kernel", "top-k"),
    ("_resolve_kernel", "residency"),
    ("_copy_rows", "missing rows over the bus"),
    ("attend", "attention"),
    ("merge", "merge"),
)
"""What a kernel is called in the drawing, by a part of its name; others have their names in a tooltip only."""


def step_alone(events: Sequence[Event]) -> list[Event]:
    """Without what came before a pause at the step's beginning."""
    ordered = sorted(events, key=lambda event: float(event["ts"]))
    middle = span(ordered) / 2
    late = [b["ts"] for a, b in pairwise(ordered) if b["ts"] - a["ts"] - a["dur"] > START_GAP_US and b["ts"] < middle]
    return from_zero([event for event in ordered if not late or event["ts"] >= late[-1]])


def around_first_copy(events: Sequence[Event]) -> tuple[float, float] | None:
    """Microseconds, from and to; None if no rows were copied."""
    firsts = [next((e for e in events if role(e) == name), None) for name, _ in ROLES[:2]]
    copy, residency = firsts
    if copy is None:
        return None
    start = float(residency["ts"] if residency is not None else copy["ts"])
    return max(0.0, start - BEFORE_US), min(span(events), copy["ts"] + copy["dur"] + BEHIND_US)


def compute_stream(events: Sequence[Event]) -> Any:
    """The stream of most of what computes."""
    return Counter(event["tid"] for event in events if role(event) == LANES[0]).most_common(1)[0][0]


def lane_of(event: Event, stream: Any) -> str:
    """Its role; copies on the stream that computes move no blocks, but inputs and tokens."""
    return LANES[0] if event["tid"] == stream and role(event) == LANES[-1] else role(event)


def panel(events: Sequence[Event], lanes: Sequence[str], *, top: int, first: float, last: float) -> list[str]:
    """Bars of the events between two times; those wide enough say what they are.

    A kernel that was launched while the one before still ran is drawn from that one's end: until then it waited.
    """
    scale = (WIDTH - LEFT - RIGHT) / (last - first)
    parts, stream, done = [], compute_stream(events), dict.fromkeys(lanes, first)
    for row, lane in enumerate(lanes):
        y = top + row * LANE
        parts.append(f'<text x="12" y="{y + 17}">{lane}</text>')
        parts.append(f'<line x1="{LEFT}" y1="{y + BAR + 3}" x2="{WIDTH - RIGHT}" y2="{y + BAR + 3}" stroke="#cccccc"/>')
    for event in events:
        lane = lane_of(event, stream)
        begin, end = max(event["ts"], done[lane]), min(event["ts"] + event["dur"], last)
        if begin >= end:
            continue
        done[lane] = end
        x, y, wide = LEFT + (begin - first) * scale, top + lanes.index(lane) * LANE, (end - begin) * scale
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{max(wide, 0.3):.2f}" height="{BAR}" fill="{COLORS[lane]}" '
            f'stroke="white" stroke-width="{0.5 if wide > 3 else 0}">'
            f"<title>{escape(event['name'])}, {event['dur']:.1f} us</title></rect>"
        )
        called = next((name for part, name in KERNELS if part in event["name"]), "")
        if called and 8 + len(called) * LETTER < wide:
            parts.append(f'<text x="{x + 4:.2f}" y="{y + 17}">{called}</text>')
    bottom = top + LANE * len(lanes)
    step = next(step for step in TICKS_US if (last - first) / step < 9)
    for tick in range(math.ceil(first / step), math.floor(last / step) + 1):
        x = LEFT + (tick * step - first) * scale
        anchor = "middle" if x < WIDTH - 2 * RIGHT else "end"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="{anchor}">{tick * step / 1e3:g} ms</text>')
    return parts


def drawing(events: Sequence[Event], what: dict[str, Any]) -> str:
    """The SVG; lanes in which nothing ran are left out."""
    if not events:
        raise SystemExit("the trace holds no event of a device, so there is nothing to draw")
    events = step_alone(events)
    stream = compute_stream(events)
    lanes = [lane for lane in LANES if any(lane_of(event, stream) == lane for event in events)]
    long, found, near = span(events), copies(events), around_first_copy(events)
    name = ", ".join(f"{key} {value}" for key, value in what.items())
    beside = f"rows copied for {found['copy_ms']:.2f} ms, {found['copy_beside_compute']:.0%} of it beside compute"
    high = TOP + LANE * len(lanes) + 30
    parts = panel(events, lanes, top=TOP, first=0.0, last=long)
    if near is not None:
        parts.append(f'<text x="12" y="{high + 14}">Around the first copy of rows:</text>')
        parts += panel(events, lanes, top=high + 26, first=near[0], last=near[1])
        high += 26 + LANE * len(lanes) + 30
    box = f'viewBox="0 0 {WIDTH} {high}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{high}" fill="white"/>',
        f'<text x="12" y="22" font-size="14">{escape(name)}: {long / 1e3:.2f} ms</text>',
        f'<text x="12" y="42">{escape(beside)}</text>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    trace = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(drawing(trace["traceEvents"], trace.get("otherData", {})))


if __name__ == "__main__":
    main()
