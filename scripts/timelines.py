"""Draws the two timelines of docs/streams.md: one decode segment and its eager break, under each policy.

Lengths are made up: what the drawings show is which piece may run beside which.

python scripts/timelines.py          # say whether the drawings are up to date
python scripts/timelines.py --write  # write docs/timeline-external.svg and docs/timeline-stream.svg
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
POLICIES = ("external", "stream")
SCALE, LEFT, TOP, LANE = 3.0, 96, 60, 54
"""Pixels: a unit of time, room for the lanes' names, for the title, a lane's height."""


@dataclass(frozen=True)
class Work:
    """A piece of work: its lane, its length in units of time and what it must follow."""

    name: str
    lane: str
    length: int
    after: tuple[str, ...]
    color: str


def work_under(policy: str) -> tuple[Work, ...]:
    """Behind the top-k the segment has other work; the conversion needs the top-k only."""
    conversion_after = {"external": ("top-k",), "stream": ("rest of the segment",)}[policy]
    return (
        Work("top-k", "compute", 30, (), "#8fb4dc"),
        Work("rest of the segment", "compute", 90, ("top-k",), "#cfe3f5"),
        Work("conversion", "side", 60, conversion_after, "#f9b36b"),
        Work("attention", "compute", 50, ("rest of the segment", "conversion"), "#9bcf93"),
    )


def starts(items: tuple[Work, ...]) -> dict[str, int]:
    """When each piece begins: as soon as everything before it is done."""
    ends: dict[str, int] = {}
    begin: dict[str, int] = {}
    for item in items:
        begin[item.name] = max((ends[name] for name in item.after), default=0)
        ends[item.name] = begin[item.name] + item.length
    return begin


def total_of(policy: str) -> int:
    """When the last piece is done."""
    items = work_under(policy)
    begin = starts(items)
    return max(begin[item.name] + item.length for item in items)


def drawing(policy: str) -> str:
    """The SVG, on the scale and of the width that both policies share."""
    items, lanes = work_under(policy), ("compute", "side")
    begin = starts(items)
    width = LEFT + round(max(map(total_of, POLICIES)) * SCALE) + 24
    bottom = TOP + LANE * len(lanes)
    height = bottom + 40
    box = f'viewBox="0 0 {width} {height}"'
    title = f"policy {policy}: done after {total_of(policy)} (lengths are made up)"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="22" font-size="14">{title}</text>',
    ]
    for row, lane in enumerate(lanes):
        y = TOP + row * LANE
        parts.append(f'<text x="12" y="{y + 22}">{lane}</text>')
        parts.append(f'<line x1="{LEFT}" y1="{y + 42}" x2="{width - 12}" y2="{y + 42}" stroke="#cccccc"/>')
    for item in items:
        x, y, long = LEFT + begin[item.name] * SCALE, TOP + lanes.index(item.lane) * LANE, item.length * SCALE
        parts.append(f'<rect x="{x:g}" y="{y}" width="{long:g}" height="36" fill="{item.color}"/>')
        parts.append(f'<text x="{x + long / 2:g}" y="{y + 22}" text-anchor="middle">{item.name}</text>')
    published = begin["top-k"] + items[0].length
    for name, at, low in (("publish", published, False), ("the wait ends", begin["conversion"], True)):
        x = LEFT + at * SCALE
        top, end = (TOP, bottom + 10) if low else (TOP - 8, bottom)
        parts.append(f'<line x1="{x:g}" y1="{top}" x2="{x:g}" y2="{end}" stroke="black" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{x + 4:g}" y="{bottom + 14 if low else TOP - 10}">{name}</text>')
    parts.append(f'<text x="{width - 12}" y="{bottom + 30}" text-anchor="end">time</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def main() -> int:
    stale = []
    for policy in POLICIES:
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
