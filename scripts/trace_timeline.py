"""Draws a step from a trace that ``benchmarks/hisparse_gpu.py`` or ``policies_gpu.py`` recorded.

PYTHONPATH=. python scripts/trace_timeline.py benchmarks/results/NAME.trace.json docs/hisparse-timeline.svg
PYTHONPATH=. python scripts/trace_timeline.py NAME.trace.json OUT.svg --lanes streams --window 1.34 1.41

Above the whole step, below it a part of it, kernel by kernel: what surrounds the first copy of rows, if none is asked
for. Lanes are what kernels are for, and show what was computed while rows were copied; or they are the streams.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.step_trace import ROLES, Event, copies, from_zero, role, span

LANES = ("compute", *(name for name, _ in ROLES))
STREAMS = ("compute stream", "side stream")
COLORS = {"compute": "#8fb4dc", "rows from the host": "#f9b36b", "residency": "#c8a2d8", "blocks that move": "#9bcf93"}
COLORS |= {"compute stream": "#8fb4dc", "side stream": "#f9b36b"}
WIDTH, LEFT, RIGHT, TOP, LANE, BAR = 1100, 150, 24, 64, 34, 26
"""Pixels: of the drawing, room beside the lanes and above them, a lane's height, a bar's."""
LETTER = 7.5
"""Pixels that a letter takes at most."""
START_GAP_US = 100.0
"""Under a profiler a step's inputs arrive so long before its graph is launched; what is drawn begins with the graph."""
BEFORE_US, BEHIND_US = 110.0, 90.0
"""Of the lower half: from so long before residency to so long behind the copy."""
TICKS_US = (5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6, 1e9)
KERNELS = (
    ("nvjet", "GEMM"),
    ("_gate_up", "experts"),
    ("_down", "experts"),
    ("_scores_kernel", "index scores"),
    ("_select_kernel", "top-k"),
    ("_resolve_", "residency"),
    ("_map_kernel", "conversion"),
    ("_write_pools", "index keys"),
    ("_write", "row"),
    ("_copy_rows", "missing rows"),
    ("attend", "attention"),
    ("merge", "merge"),
)
"""What a kernel is called in the drawing, by a part of its name; others have their names in a tooltip only."""


def step_alone(events: Sequence[Event]) -> list[Event]:
    """Without what came before a pause at the step's beginning."""
    ordered = sorted(events, key=lambda event: float(event["ts"]))
    middle = span(ordered) / 2
    ends = accumulate((event["ts"] + event["dur"] for event in ordered), max)
    behind = [(event["ts"], event["ts"] - end) for event, end in zip(ordered[1:], ends, strict=False)]
    late = [ts for ts, pause in behind if pause > START_GAP_US and ts < middle]
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


def lane_of(event: Event, stream: Any, lanes: Sequence[str]) -> str:
    """Its stream if lanes are those, else its role; copies on the stream that computes move no blocks, but inputs and
    tokens."""
    if lanes[0] == STREAMS[0]:
        return STREAMS[event["tid"] != stream]
    return LANES[0] if event["tid"] == stream and role(event) == LANES[-1] else role(event)


def bars(
    events: Sequence[Event], lanes: Sequence[str], first: float, last: float
) -> dict[str, list[tuple[float, float, Event]]]:
    """Beginning and end of each event between two times, lane by lane.

    A kernel that was launched while the one before still ran is drawn from that one's end: until then it waited.
    """
    found: dict[str, list[tuple[float, float, Event]]] = {lane: [] for lane in lanes}
    stream, done = compute_stream(events), dict.fromkeys(lanes, first)
    for event in events:
        lane = lane_of(event, stream, lanes)
        begin, end = max(event["ts"], done[lane]), min(event["ts"] + event["dur"], last)
        if begin < end:
            done[lane] = end
            found[lane].append((begin, end, event))
    return found


def panel(events: Sequence[Event], lanes: Sequence[str], *, top: int, first: float, last: float) -> list[str]:
    """Bars of the events between two times; those wide enough, or with room behind them, say what they are."""
    scale = (WIDTH - LEFT - RIGHT) / (last - first)
    parts = []
    for row, (lane, found) in enumerate(bars(events, lanes, first, last).items()):
        y = top + row * LANE
        parts.append(f'<text x="12" y="{y + 17}">{lane}</text>')
        parts.append(f'<line x1="{LEFT}" y1="{y + BAR + 3}" x2="{WIDTH - RIGHT}" y2="{y + BAR + 3}" stroke="#cccccc"/>')
        for (begin, end, event), behind in zip(found, [*(bar[0] for bar in found[1:]), last], strict=True):
            x, wide = LEFT + (begin - first) * scale, (end - begin) * scale
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{max(wide, 0.3):.2f}" height="{BAR}" fill="{COLORS[lane]}" '
                f'stroke="white" stroke-width="{0.5 if wide > 3 else 0}">'
                f"<title>{escape(event['name'])}, {event['dur']:.1f} us</title></rect>"
            )
            called = next((name for part, name in KERNELS if part in event["name"]), "")
            room = 8 + len(called) * LETTER
            if called and (room < wide or room < (behind - end) * scale):
                parts.append(f'<text x="{x + 4 + (0 if room < wide else wide):.2f}" y="{y + 17}">{called}</text>')
    bottom = top + LANE * len(lanes)
    step = next(step for step in TICKS_US if (last - first) / step < 9)
    for tick in range(math.ceil(first / step), math.floor(last / step) + 1):
        x = LEFT + (tick * step - first) * scale
        anchor = "middle" if x < WIDTH - 2 * RIGHT else "end"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="{anchor}">{tick * step / 1e3:g} ms</text>')
    return parts


def drawing(
    events: Sequence[Event],
    what: dict[str, Any],
    *,
    streams: bool = False,
    window: tuple[float, float] | None = None,
) -> str:
    """The SVG; lanes in which nothing ran are left out.

    Args:
        streams: lanes are streams: the one that computes most, and all others.
        window: of the lower half, from and to in microseconds as the upper one has them.
    """
    if not events:
        raise SystemExit("the trace holds no event of a device, so there is nothing to draw")
    events = step_alone(events)
    long, found, stream = span(events), copies(events), compute_stream(events)
    if window is not None and not 0 <= window[0] < window[1] <= long:
        raise SystemExit(f"--window is {window[0] / 1e3:g} to {window[1] / 1e3:g} ms, and the step 0 to {long / 1e3:g}")
    near = window or around_first_copy(events)
    everything = STREAMS if streams else LANES
    lanes = [lane for lane in everything if any(lane_of(event, stream, everything) == lane for event in events)]
    name = ", ".join(f"{key} {value}" for key, value in what.items())
    about = f"rows copied for {found['copy_ms']:.2f} ms, {found['copy_beside_compute']:.0%} of it beside compute"
    about = "" if streams else about
    high = TOP + LANE * len(lanes) + 30
    parts = panel(events, lanes, top=TOP, first=0.0, last=long)
    if near is not None:
        below = "Around the first copy of rows:" if window is None else f"{near[0] / 1e3:g} to {near[1] / 1e3:g} ms:"
        parts.append(f'<text x="12" y="{high + 14}">{below}</text>')
        parts += panel(events, lanes, top=high + 26, first=near[0], last=near[1])
        high += 26 + LANE * len(lanes) + 30
    box = f'viewBox="0 0 {WIDTH} {high}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{high}" fill="white"/>',
        f'<text x="12" y="22" font-size="14">{escape(name)}: {long / 1e3:.2f} ms</text>',
        f'<text x="12" y="42">{escape(about)}</text>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("svg", type=Path)
    parser.add_argument("--lanes", choices=("roles", "streams"), default="roles")
    parser.add_argument("--window", type=float, nargs=2, metavar=("FROM", "TO"), help="ms, of the lower half")
    args = parser.parse_args(arguments)
    trace = json.loads(args.trace.read_text())
    window = None if args.window is None else (1e3 * args.window[0], 1e3 * args.window[1])
    named = trace.get("otherData", {})
    args.svg.write_text(drawing(trace["traceEvents"], named, streams=args.lanes == "streams", window=window))


if __name__ == "__main__":
    main()
