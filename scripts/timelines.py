"""Draws the two timelines of docs/streams.md: one decode segment and its eager break, under each policy.

python scripts/timelines.py          # say whether the drawings are up to date
python scripts/timelines.py --write  # write docs/timeline-external.svg and docs/timeline-stream.svg
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
SCALE, LEFT, TOP, LANE = 3.0, 96, 44, 54
"""Pixels: a microsecond, room for the lanes' names, for the title, a lane's height."""


@dataclass(frozen=True)
class Work:
    """A piece of work: its lane, its length in microseconds and what it must follow."""

    name: str
    lane: str
    length: int
    after: tuple[str, ...]
    color: str


def work_under(policy: str) -> tuple[Work, ...]:
    """Behind the top-k the segment has other work; the conversion needs the top-k only."""
    conversion_after = {"external": ("top-k",), "stream": ("rest of the segment",)}[policy]
    return (
        Work("top-k", "compute", 30, (), "#4c78a8"),
        Work("rest of the segment", "compute", 90, ("top-k",), "#9ecae9"),
        Work("conversion", "side", 60, conversion_after, "#f58518"),
        Work("attention", "compute", 50, ("rest of the segment", "conversion"), "#54a24b"),
    )


def starts(items: tuple[Work, ...]) -> dict[str, int]:
    """When each piece begins: as soon as everything before it is done."""
    ends: dict[str, int] = {}
    begin: dict[str, int] = {}
    for item in items:
        begin[item.name] = max((ends[name] for name in item.after), default=0)
        ends[item.name] = begin[item.name] + item.length
    return begin


def drawing(policy: str) -> str:
    """The SVG."""
    items = work_under(policy)
    begin = starts(items)
    total = max(begin[item.name] + item.length for item in items)
    lanes = ("compute", "side")
    width, height = LEFT + round(total * SCALE) + 24, TOP + LANE * len(lanes) + 34
    publish = begin["top-k"] + 30
    box = f'viewBox="0 0 {width} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="22" font-size="14">policy {policy}: {total} us</text>',
    ]
    for row, lane in enumerate(lanes):
        y = TOP + row * LANE
        parts.append(f'<text x="12" y="{y + 23}">{lane}</text>')
        parts.append(f'<line x1="{LEFT}" y1="{y + 42}" x2="{width - 12}" y2="{y + 42}" stroke="#cccccc"/>')
    for item in items:
        x, y = LEFT + begin[item.name] * SCALE, TOP + lanes.index(item.lane) * LANE
        parts.append(f'<rect x="{x:g}" y="{y}" width="{item.length * SCALE:g}" height="36" fill="{item.color}"/>')
        parts.append(f'<text x="{x + item.length * SCALE / 2:g}" y="{y + 22}" text-anchor="middle">{item.name}</text>')
    x = LEFT + publish * SCALE
    bottom = TOP + LANE * len(lanes)
    parts.append(f'<line x1="{x:g}" y1="{TOP - 8}" x2="{x:g}" y2="{bottom}" stroke="black" stroke-dasharray="4 3"/>')
    parts.append(f'<text x="{x + 4:g}" y="{TOP - 10}">publish</text>')
    waited = LEFT + begin["conversion"] * SCALE
    parts.append(f'<text x="{waited + 4:g}" y="{bottom + 14}">the wait ends here</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def main() -> int:
    stale = []
    for policy in ("external", "stream"):
        path = DOCS / f"timeline-{policy}.svg"
        if "--write" in sys.argv[1:]:
            path.write_text(drawing(policy))
        elif not path.exists() or path.read_text() != drawing(policy):
            stale.append(path.name)
    for name in stale:
        print(f"{name} is not what this script draws")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
