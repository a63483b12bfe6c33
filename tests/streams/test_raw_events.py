"""Only ``streams/`` orders streams: raw events and stream waits anywhere else fail the build."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sidestream

PACKAGE = Path(sidestream.__file__).parent
RAW = {
    "Event",
    "ExternalStream",
    "is_current_stream_capturing",
    "record_event",
    "record_stream",
    "wait_event",
    "wait_stream",
}
OWNERS = {"backend"}
"""``backend.wait_stream(...)`` and ``backend.record_stream(...)`` are the protocol's own."""


def raw_uses(source: str) -> list[str]:
    """``line: name`` of each use of what belongs into ``streams/``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in RAW:
            owner = ast.unparse(node.value)
            if node.attr in ("Event", "ExternalStream", "is_current_stream_capturing"):
                if owner in ("torch", "cuda", "torch.cuda", "torch.accelerator"):
                    found.append(f"{node.lineno}: {node.attr}")
            elif owner.split(".")[-1].strip("_") not in OWNERS:
                found.append(f"{node.lineno}: {node.attr}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found += [f"{node.lineno}: {alias.name}" for alias in node.names if alias.name in RAW]
    return found


def test_no_module_outside_of_streams_orders_streams() -> None:
    wrong = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] != "streams" and (found := raw_uses(path.read_text())):
            wrong[str(path.relative_to(PACKAGE))] = found
    assert not wrong, f"use a Handoff: {wrong}"


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ne = torch.cuda.Event()",
        "from torch.cuda import Event",
        "from torch import cuda\ncuda.Event(external=True)",
        "s.wait_event(e)",
        "torch.cuda.current_stream().wait_stream(s)",
        "x.record_stream(s)",
        "if torch.cuda.is_current_stream_capturing(): pass",
    ],
)
def test_the_lint_sees_each_way_to_do_it(source: str) -> None:
    assert len(raw_uses(source)) == 1


@pytest.mark.parametrize(
    "source",
    ["self._backend.wait_stream(s)", "streams.backend.record_stream(x, s)", "import threading\nthreading.Event()"],
)
def test_the_lint_lets_the_protocol_pass(source: str) -> None:
    assert raw_uses(source) == []
