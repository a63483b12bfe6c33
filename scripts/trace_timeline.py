"""Draws a step from a trace that ``benchmarks/hisparse_gpu.py`` recorded: what was computed while rows were copied.

PYTHONPATH=. python scripts/trace_timeline.py benchmarks/results/NAME.trace.json docs/hisparse-timeline.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.step_trace import ROLES, Event, copies, role, span

LANES = ("compute", *(name for name, _ in ROLES))
COLORS = {"compute": "#8fb4dc", "rows from the host": "#f9b36b", "residency": "#c8a2d8", "blocks that move": "#9bcf93"}
WIDTH, LEFT, TOP, LANE = 1100, 150, 60, 46
"""Pixels: of the drawing, room for the lanes' names and the title, a lane's height."""


def drawing(events: Sequence[Event], what: dict[str, Any]) -> str:
    """The SVG; lanes in which nothing ran are left out."""
    if not events:
        raise SystemExit("the trace holds no event of a device, so there is nothing to draw")
    lanes = [lane for lane in LANES if any(role(event) == lane for event in events)]
    long, found = span(events), copies(events)
    scale = (WIDTH - LEFT - 24) / long
    bottom = TOP + LANE * len(lanes)
    name = ", ".join(f"{key} {value}" for key, value in what.items())
    beside = f"rows copied for {found['copy_ms']:.2f} ms, {found['copy_beside_compute']:.0%} of it beside compute"
    box = f'viewBox="0 0 {WIDTH} {bottom + 40}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{bottom + 40}" fill="white"/>',
        f'<text x="12" y="20" font-size="14">{escape(name)}: {long / 1e3:.2f} ms</text>',
        f'<text x="12" y="40">{escape(beside)}</text>',
    ]
    for row, lane in enumerate(lanes):
        y = TOP + row * LANE
        parts.append(f'<text x="12" y="{y + 22}">{lane}</text>')
        parts.append(f'<line x1="{LEFT}" y1="{y + 38}" x2="{WIDTH - 24}" y2="{y + 38}" stroke="#cccccc"/>')
    for event in events:
        lane = role(event)
        x, y = LEFT + event["ts"] * scale, TOP + lanes.index(lane) * LANE
        title = f"{escape(event['name'])}, {event['dur']:.1f} us"
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{max(event["dur"] * scale, 0.3):.2f}" height="34" '
            f'fill="{COLORS[lane]}"><title>{title}</title></rect>'
        )
    for tenth in range(0, 11, 2):
        x = LEFT + tenth / 10 * long * scale
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 24}" text-anchor="middle">{tenth / 10 * long / 1e3:.2f} ms</text>'
        )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    trace = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(drawing(trace["traceEvents"], trace.get("otherData", {})))


if __name__ == "__main__":
    main()
