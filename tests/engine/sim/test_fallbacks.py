"""Steps that do not get the graph which the setting asks for are counted with their reason, and all others are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidestream.core.cudagraph_mode import CUDAGraphMode
from sidestream.graphs.dispatch import NOT_UNIFORM, TOO_LARGE
from tests.engine.harness import Part, Schedule, random_sequences
from tests.engine.sim.harness import SETTINGS, VOCAB, SimHarness, decodes, make_model

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


def schedule() -> Schedule:
    """Two steps of nine and more tokens, three mixed ones of at most eight, four decodes."""
    return [
        [Part(0, 16)],
        [*decodes(0), Part(1, 8)],
        [*decodes(0), Part(1, 7)],
        [*decodes(0), Part(1, 1)],  # a chunk of one token is no decode
        [Part(2, 2)],
        *[decodes(0, 1, 2)] * 3,
        decodes(1),
    ]


EXPECTED: dict[str, tuple[dict[CUDAGraphMode, int], dict[str, int]]] = {
    "none": ({NONE: 9}, {}),
    "piecewise": ({NONE: 2, PIECEWISE: 7}, {TOO_LARGE: 2}),
    "full": ({NONE: 5, FULL: 4}, {NOT_UNIFORM: 5}),
    "full_and_piecewise": ({NONE: 2, PIECEWISE: 3, FULL: 4}, {TOO_LARGE: 2}),
}
"""Steps by mode, and fallbacks by reason."""


@pytest.mark.parametrize("setting", SETTINGS)
def test_fallbacks_are_counted_by_reason(setting: str, tmp_path: Path) -> None:
    make_model("deepseek_v32", tmp_path)
    harness = SimHarness(tmp_path, setting)
    dispatcher = harness.graphs.dispatcher
    assert not dispatcher.steps, "captures are no steps"
    assert not dispatcher.fallbacks
    harness.run(random_sequences((22, 20, 5), vocab=VOCAB, seed=9), schedule())
    assert (dict(dispatcher.steps), dict(dispatcher.fallbacks)) == EXPECTED[setting]


def test_without_a_limit_every_size_is_captured_and_nothing_falls_back(tmp_path: Path) -> None:
    make_model("deepseek_v32", tmp_path)
    harness = SimHarness(tmp_path, "full_and_piecewise", max_capture_tokens=None)
    harness.run(random_sequences((22, 20, 5), vocab=VOCAB, seed=9), schedule())
    assert dict(harness.graphs.dispatcher.steps) == {PIECEWISE: 5, FULL: 4}
    assert not harness.graphs.dispatcher.fallbacks
