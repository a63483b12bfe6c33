"""The page of ``sidestream inspect``: one HTML file, pictures and data within."""

from __future__ import annotations

import base64
import html
import json
import struct
import zlib
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np

from sidestream.engine.inspection.inspect import Inspection
from sidestream.engine.inspection.selection import Selection
from sidestream.engine.inspection.timeline import Lane

COLUMNS, ROWS = 512, 256
"""Most cells of a heat map; longer sequences share them."""
PAPER, EMPTY, FULL = (232, 236, 240), (255, 255, 255), (20, 70, 140)
"""Colours of a cell behind the query, of one that was not chosen, and of one that was chosen whole."""
SHADES = ("#2563a8", "#b45309", "#0f766e", "#7c3aed", "#9d174d", "#4d7c0f")
LANE, WIDTH = 34, 1100
TICKS = 5
NO_INDEXER = "<p>The model has no indexer.</p>"
LISTED = 12
"""Names in the timeline's table."""
MAX_ENTRIES = 1_000_000
"""Choices that the page carries for its script; of longer runs the last queries are kept."""


def page(inspection: Inspection) -> str:
    """The whole page."""
    template = (resources.files("sidestream") / "cli" / "inspect_page.html").read_text(encoding="utf-8")
    parts = {
        "TITLE": html.escape(f"{inspection.model} on {inspection.device}"),
        "FACTS": html.escape(_facts(inspection)),
        "LAYERS": _layers(inspection),
        "MAPS": "\n".join(_map(i, s, inspection) for i, s in enumerate(inspection.selections)) or NO_INDEXER,
        "STEP": html.escape(_step(inspection)),
        "TIMELINE": _timeline(inspection.lanes),
        "LEDGER": _ledger(inspection.ledger),
        "DATA": _data(inspection),
    }
    for name, text in parts.items():
        template = template.replace(f"<!--{name}-->", text)
    return template


def _facts(inspection: Inspection) -> str:
    made = len(inspection.tokens) - inspection.num_prompt
    limit = (
        ""
        if inspection.topk is None
        else f"; an indexer chooses {inspection.topk} tokens, and those of an unfinished pool"
    )
    return f"{inspection.num_prompt} prompt tokens, {made} generated{limit}"


def _map(place: int, selection: Selection, inspection: Inspection) -> str:
    heat = selection.heat(min(COLUMNS, max(selection.chosen, default=0) + 1))
    heat = heat[np.unique(np.linspace(0, len(heat) - 1, min(ROWS, len(heat))).astype(int))] if len(heat) else heat
    leader, followers = selection.layers[0], selection.layers[1:]
    name = f"Layers {_listed(selection.layers)}: layer {leader} chooses" if followers else f"Layer {leader}"
    picture = base64.b64encode(png(_colours(heat))).decode()
    last = max(selection.chosen, default=0)
    prompt = 100 * inspection.num_prompt / (last + 1)
    return (
        f'<figure><figcaption>{name}</figcaption><div class="map" data-group="{place}"><img '
        f'alt="What the indexer of layer {leader} chose" src="data:image/png;base64,{picture}">'
        f'<i class="prompt" style="top:{prompt:.2f}%"></i><i class="at"></i></div>'
        f'<div class="axis"><span>token 0</span><span>chosen token →</span><span>{last}</span></div></figure>'
    )


def _layers(inspection: Inspection) -> str:
    """Every layer by number: what attends there, and whose indexer it goes by."""
    leader_of = {layer: selection.layers[0] for selection in inspection.selections for layer in selection.layers}
    chips = []
    for number, attention in enumerate(inspection.layers):
        leader = leader_of.get(number)
        if leader is None:
            kind, note = "plain", ""
        elif leader == number:
            kind, note = "leader", ": chooses"
        else:
            kind, note = "follower", f": as layer {leader}"
        chips.append(f'<li class="{kind}"><b>{number}</b> {attention}{note}</li>')
    return f'<ol class="layers">{"".join(chips)}</ol>'


def _listed(layers: Sequence[int]) -> str:
    names = [str(layer) for layer in layers]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _step(inspection: Inspection) -> str:
    if inspection.traced_position is None:
        return "No step was traced."
    return (
        f"The decode step of token {inspection.traced_position} under the profiler, which makes it slower than in "
        "service. A block is an operator, or a kernel of a GPU; its name and time show under the pointer. "
        f"{inspection.trace.name} is the whole trace, for chrome://tracing or ui.perfetto.dev."
    )


def _colours(heat: np.ndarray) -> np.ndarray:
    """[rows, columns, 3] uint8 of shares in [0, 1] or NaN."""
    share = np.nan_to_num(heat)[..., None]
    mixed = np.array(EMPTY) * (1 - share) + np.array(FULL) * share
    return np.where(np.isnan(heat)[..., None], np.array(PAPER), mixed).round().astype(np.uint8)


def png(pixels: np.ndarray) -> bytes:
    """An RGB picture [rows, columns, 3] uint8 in the PNG format (ISO/IEC 15948)."""
    rows, columns, _ = pixels.shape
    lines = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _timeline(lanes: list[Lane]) -> str:
    if not lanes:
        return "<p>Nothing was traced.</p>"
    whole = max(span.begin + span.length for lane in lanes for span in lane.spans)
    names = sorted({span.name for lane in lanes for span in lane.spans}, key=lambda name: -_time(lanes, name))
    shade = {name: SHADES[i % len(SHADES)] for i, name in enumerate(names)}
    parts = []
    for place, lane in enumerate(lanes):
        top = 22 + place * (LANE + 18)
        share = 100 * lane.busy / whole
        parts.append(f'<text x="0" y="{top - 6}">{html.escape(lane.name)}, busy {share:.0f} %</text>')
        for span in lane.spans:
            x, width = WIDTH * span.begin / whole, max(WIDTH * span.length / whole, 0.4)
            title = html.escape(f"{span.name}: {span.length:.1f} us at {span.begin:.1f} us")
            parts.append(
                f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{LANE}" fill="{shade[span.name]}">'
                f"<title>{title}</title></rect>"
            )
    height = 22 + len(lanes) * (LANE + 18) + 4
    for tick in range(TICKS + 1):
        x, anchor = WIDTH * tick / TICKS, "start" if tick == 0 else "end" if tick == TICKS else "middle"
        parts.append(f'<line x1="{x:.1f}" y1="22" x2="{x:.1f}" y2="{height - 14}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{height}" text-anchor="{anchor}">'
            f"{_time_of(whole * tick / TICKS)}</text>"
        )
    rows = "".join(
        f'<tr><td><i style="background:{shade[name]}"></i>{html.escape(name)}</td>'
        f"<td>{_calls(lanes, name)}</td><td>{_time(lanes, name):.1f}</td>"
        f"<td>{100 * _time(lanes, name) / whole:.1f} %</td></tr>"
        for name in names[:LISTED]
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Timeline of one decode step">'
        f"{''.join(parts)}</svg>"
        f"<p>{_time_of(whole)} from the first operator to the last.</p>"
        f"<table><tr><th>most time</th><th>calls</th><th>us</th><th>of the step</th></tr>{rows}</table>"
    )


def _calls(lanes: list[Lane], name: str) -> int:
    return sum(span.name == name for lane in lanes for span in lane.spans)


def _time_of(us: float) -> str:
    return f"{us / 1000:.1f} ms" if us >= 1000 else f"{us:.0f} us"


def _time(lanes: list[Lane], name: str) -> float:
    return sum(span.length for lane in lanes for span in lane.spans if span.name == name)


def _ledger(ledger: dict[str, Any]) -> str:
    rows = [(name, part["predicted"], part["measured"]) for name, part in ledger["parts"].items()]
    rows.append(("all parts", ledger["predicted"], ledger["measured"]))
    lines = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{size(predicted)}</td><td>{size(measured)}</td></tr>"
        for name, predicted, measured in rows
    )
    budget = f"<tr><td>budget (memory_limit)</td><td></td><td>{size(ledger['budget'])}</td></tr>"
    return f"<table><tr><th>part</th><th>foreseen</th><th>measured</th></tr>{lines}{budget}</table>"


def size(count: int) -> str:
    """Bytes in the largest unit of which there is at least one."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _data(inspection: Inspection) -> str:
    """What the page's script shows: tokens, and each query's choice, as JSON that cannot end the script element."""
    kept = MAX_ENTRIES // max(1, len(inspection.selections))
    groups = [{"layers": s.layers, "chosen": _last_choices(s, kept)} for s in inspection.selections]
    data = {"tokens": inspection.tokens, "prompt": inspection.num_prompt, "groups": groups}
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _last_choices(selection: Selection, entries: int) -> dict[int, list[int]]:
    """The last queries whose choices are at most so many positions together."""
    kept: dict[int, list[int]] = {}
    for query in sorted(selection.chosen, reverse=True):
        entries -= len(selection.chosen[query])
        if entries < 0:
            break
        kept[query] = selection.chosen[query].tolist()
    return kept
