"""The page of ``sidestream inspect``: one HTML file, pictures and data within."""

from __future__ import annotations

import base64
import html
import json
import struct
import zlib
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
        "MAPS": "\n".join(_map(selection) for selection in inspection.selections) or "<p>The model has no indexer.</p>",
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


def _map(selection: Selection) -> str:
    heat = selection.heat(min(COLUMNS, max(selection.chosen, default=0) + 1))
    heat = heat[np.unique(np.linspace(0, len(heat) - 1, min(ROWS, len(heat))).astype(int))] if len(heat) else heat
    leader, followers = selection.layers[0], selection.layers[1:]
    name = f"layer {leader}" + (f", for layers {', '.join(map(str, followers))} too" if followers else "")
    picture = base64.b64encode(png(_colours(heat))).decode()
    return (
        f'<figure><figcaption>{name}</figcaption><img alt="What the indexer of layer {leader} chose" '
        f'src="data:image/png;base64,{picture}"></figure>'
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
    height = 22 + len(lanes) * (LANE + 18)
    rows = "".join(
        f'<tr><td><i style="background:{shade[name]}"></i>{html.escape(name)}</td>'
        f"<td>{_time(lanes, name):.1f}</td></tr>"
        for name in names[:LISTED]
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Timeline of one decode step">'
        f"{''.join(parts)}</svg>"
        f"<p>{whole:.0f} us from first to last.</p><table><tr><th>most time</th><th>us</th></tr>{rows}</table>"
    )


def _time(lanes: list[Lane], name: str) -> float:
    return sum(span.length for lane in lanes for span in lane.spans if span.name == name)


def _ledger(ledger: dict[str, Any]) -> str:
    rows = [(name, part["predicted"], part["measured"]) for name, part in ledger["parts"].items()]
    rows.append(("all parts", ledger["predicted"], ledger["measured"]))
    lines = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{predicted / 2**20:.1f}</td><td>{measured / 2**20:.1f}</td></tr>"
        for name, predicted, measured in rows
    )
    budget = f"<tr><td>budget</td><td></td><td>{ledger['budget'] / 2**20:.1f}</td></tr>"
    return f"<table><tr><th>MiB</th><th>predicted</th><th>measured</th></tr>{lines}{budget}</table>"


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
