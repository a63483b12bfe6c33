"""What the engine's waits across streams become in each mode: nobody turns the fine-grained ones off unseen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sidestream.streams import WaitKind
from tests.engine.harness import random_sequences
from tests.engine.sim.harness import LENGTHS, SETTINGS, VOCAB, SimHarness, every_kind_of_step, make_model

EVENT, EDGE, EXTERNAL = {WaitKind.EVENT}, {WaitKind.EDGE}, {WaitKind.EXTERNAL_EVENT}

LOGICAL = {
    "none": EVENT,
    "piecewise": EXTERNAL | EVENT,  # decodes: published in a segment; mixed batches: in a break
    "full": EDGE | EVENT,
    "full_and_piecewise": EDGE | EVENT,
}
"""Kinds of the waits for a leader's top-k, by setting, over steps of every kind."""
PHYSICAL = {"none": EVENT, "piecewise": EVENT, "full": EDGE | EVENT, "full_and_piecewise": EDGE | EVENT}
"""Of the waits for the rows."""


@pytest.mark.parametrize("setting", SETTINGS)
def test_whole_streams_are_awaited_under_policy_stream_only_and_the_bits_are_the_same(
    setting: str, tmp_path: Path
) -> None:
    make_model("deepseek_v32", tmp_path)
    sequences = random_sequences(LENGTHS, vocab=VOCAB, seed=2)
    rows: dict[str, list[torch.Tensor]] = {}
    for policy in ("external", "stream"):
        harness = SimHarness(tmp_path, setting, stream_policy=policy)
        rows[policy] = harness.run(sequences, every_kind_of_step())
        assert len(harness.groups) == 2
        for group in harness.groups:
            logical, physical = set(group.logical_topk_ready.waits), set(group.physical_topk_ready.waits)
            if policy == "external":
                assert (logical, physical) == (LOGICAL[setting], PHYSICAL[setting])
            else:
                assert logical == physical == {WaitKind.WHOLE_STREAM}
    for a, b in zip(rows["external"], rows["stream"], strict=True):
        assert torch.equal(a, b)
