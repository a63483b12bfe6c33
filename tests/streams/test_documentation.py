"""docs/streams.md: its example runs, on several schedules, and its drawings are what the script draws."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import timelines
from sidestream.streams import simulated

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("order", [simulated.Order.INLINE, simulated.Order.LAZY, simulated.Order.RANDOM])
def test_the_example_runs(
    order: simulated.Order, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "streams.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    made = simulated.SimulatedBackend(order)
    monkeypatch.setattr(simulated, "SimulatedBackend", lambda: made)
    exec(compile(blocks[0], "docs/streams.md", "exec"), {})
    assert capsys.readouterr().out.startswith("stream waits: external")


@pytest.mark.parametrize("policy", ["external", "stream"])
def test_the_drawings_are_up_to_date(policy: str) -> None:
    assert (ROOT / "docs" / f"timeline-{policy}.svg").read_text() == timelines.drawing(policy)


def test_the_drawings_show_the_overlap() -> None:
    external, stream = (timelines.starts(timelines.work_under(policy)) for policy in ("external", "stream"))
    assert external["conversion"] == external["rest of the segment"]
    assert stream["attention"] - external["attention"] == 60  # all of the conversion
