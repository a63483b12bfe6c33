"""Top-k buffers are never filled ahead of a step: whatever they hold is overwritten before it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.attention.index_group import SparseMLAIndexGroup
from tests.engine.harness import Harness, Part, random_sequences
from tests.engine.hisparse.pressed import PRESSED, host_memory, long_and_short, open_blocks
from tests.engine.sim.harness import MODELS, VOCAB, make_model

SPARSE = sorted(set(MODELS) - {"kimi_linear"})
LENGTHS = [70, 45, 20]
MIXED = [[Part(0, 1), Part(1, 30), Part(2, 4)], [Part(0, 1, is_decode=True), Part(1, 1, is_decode=True), Part(2, 9)]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in SPARSE}
    for name, folder in made.items():
        make_model(name, folder)
    return made


def hold(value: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let every step's buffers begin as ``value``; the rows of those steps."""
    real, seen = SparseMLAIndexGroup.begin_step, []

    def begin_step(group: SparseMLAIndexGroup, rows: int) -> None:
        real(group, rows)
        seen.append(rows)
        for tensor in (*group._step, *group._decode_buffers):
            tensor.fill_(value)

    monkeypatch.setattr(SparseMLAIndexGroup, "begin_step", begin_step)
    return seen


@pytest.mark.parametrize("hosted", [False, True])
@pytest.mark.parametrize("name", SPARSE)
def test_what_the_buffers_held_changes_nothing(
    name: str, hosted: bool, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = random_sequences(LENGTHS, vocab=VOCAB, seed=3)
    found = []
    for value in (-1, 0x7F7F7F7F, 0):
        with monkeypatch.context() as patch:
            seen = hold(value, patch)
            settings: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 200}
            if hosted:
                settings = {**PRESSED, "hisparse_host_memory": host_memory(folders[name])}
            harness = Harness(folders[name], **settings)
            if hosted:
                open_blocks(harness, seed=1)
                schedule = long_and_short(LENGTHS, prompt=40)
            else:
                ends = [[Part(i, 1, is_decode=True) for i in range(3)] for _ in range(6)]
                schedule = [*MIXED, *ends]
            found.append(harness.run(sequences, schedule))
        assert min(seen) <= 3 < max(seen), "both the persistent buffers and a step's own are to be used"
    for rows, *others in zip(*found, strict=True):
        assert rows.isfinite().all()
        for other in others:
            assert torch.equal(rows, other)
