"""States kept inside a chunk are those of chunks that end there; whoever else is in the step does not notice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sidestream.attention.state_rounds import plan_rounds
from sidestream.config.engine import EngineConfig
from sidestream.core.batch import MAX_SPLITS, Chunk, SlotCopy, Split
from sidestream.engine.build import BuiltEngine, build_engine
from sidestream.engine.largest_steps import largest_steps
from sidestream.engine.scratch_steps import run_step
from tests.engine.harness import random_sequences
from tests.engine.prefix.serving import BLOCK, VOCAB
from tests.tiny_models import VARIANTS, build_oracle, save_checkpoint

FIRST, SECOND, DECODING = random_sequences((150, 100, 40), vocab=VOCAB, seed=21)
KEPT = (20, 21, 22, 23)
"""Slots that no chunk runs in."""
TOLERANCE = 2e-5
"""Of fp32 states and log-probabilities of another order of the same sums."""


def chunk(
    slot: int, start: int, length: int, *, first_block: int, splits: tuple[Split, ...] = (), decode: bool = False
) -> Chunk:
    blocks = tuple(range(first_block, first_block - (-(start + length) // BLOCK)))
    return Chunk(f"s{slot}", start, length, blocks, slot, decode, True, splits)


@pytest.fixture(scope="module", params=["next", "kimi"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, overrides = VARIANTS[request.param]
    path = tmp_path_factory.mktemp(request.param)
    return save_checkpoint(build_oracle(architecture, 11, **overrides), path)


def open_engine(folder: Path) -> BuiltEngine:
    settings = {"device": "cpu", "dtype": "float32", "max_num_seqs": 30, "block_size": BLOCK, "num_blocks": 60}
    built = build_engine(folder, EngineConfig(enable_prefix_caching=False, memory_limit="2GiB", **settings))
    built.pools.poison()
    return built


def run(built: BuiltEngine, chunks: list[Chunk]) -> torch.Tensor:
    """Log-probabilities [T, vocab] of one step."""
    known = {1: FIRST, 2: SECOND, 3: DECODING}
    tokens = [token for c in chunks for token in known[c.slot][c.start : c.end]]
    output = built.runner.forward(chunks, tokens)
    return built.runner.logits(output, range(len(tokens))).log_softmax(-1)


def state(built: BuiltEngine, slot: int) -> list[torch.Tensor]:
    """Recurrent and convolution state of a slot, layer by layer."""
    pools = built.pools
    recurrent = [memory[slot] for memory in pools.recurrent.values()]
    return recurrent + [
        m.view(pools.num_slots + pools.num_snapshots, -1, m.shape[-1])[slot] for m in pools.conv.values()
    ]


def test_states_inside_chunks_are_those_of_chunks_that_end_there(folder: Path) -> None:
    """A decode and two prompts, one of them going on, each with two states kept: rows of a round lie apart."""
    whole, parts = open_engine(folder), open_engine(folder)
    for built in (whole, parts):
        run(built, [chunk(3, 0, 39, first_block=1)])
        run(built, [chunk(2, 0, 20, first_block=10)])
    decode = chunk(3, 39, 1, first_block=1, decode=True)
    splits = (Split(48, KEPT[0]), Split(128, KEPT[1])), (Split(32, KEPT[2]), Split(96, KEPT[3]))
    rows = run(
        whole,
        [
            decode,
            chunk(1, 0, 150, first_block=20, splits=splits[0]),
            chunk(2, 20, 80, first_block=10, splits=splits[1]),
        ],
    )
    expected = []
    for turn, ((start, end), (begin, stop)) in enumerate(
        zip(((0, 48), (48, 128), (128, 150)), ((20, 32), (32, 96), (96, 100)), strict=True)
    ):
        own = [chunk(1, start, end - start, first_block=20), chunk(2, begin, stop - begin, first_block=10)]
        given = run(parts, [decode, *own] if turn == 0 else own)
        first = int(turn == 0)
        expected.append((given[:first], *given[first:].split([end - start, stop - begin])))
        if turn < 2:
            for slot, kept in ((1, KEPT[turn]), (2, KEPT[2 + turn])):
                for place, (ours, theirs) in enumerate(zip(state(whole, kept), state(parts, slot), strict=True)):
                    gap = float((ours - theirs).abs().max())
                    assert gap < TOLERANCE, f"state {place} behind chunk {turn} of slot {slot}: {gap}"
    merged = torch.cat([expected[0][0]] + [expected[i][1] for i in range(3)] + [expected[i][2] for i in range(3)])
    assert float((rows - merged).abs().max()) < TOLERANCE
    for slot in (1, 2, 3):
        for ours, theirs in zip(state(whole, slot), state(parts, slot), strict=True):
            assert float((ours - theirs).abs().max()) < TOLERANCE
    for slot in set(range(1, 31)) - {1, 2, 3, *KEPT}:
        assert all(bool(part.isnan().all()) for part in state(whole, slot)), f"slot {slot} was written"


def test_rounds_cover_each_row_once_in_order() -> None:
    chunks = [
        chunk(3, 39, 1, first_block=1, decode=True),
        chunk(1, 0, 150, first_block=20, splits=(Split(48, KEPT[0]), Split(128, KEPT[1]))),
        chunk(2, 20, 80, first_block=10, splits=(Split(32, KEPT[2]),)),
        chunk(4, 0, 5, first_block=40),
    ]
    rounds = plan_rounds(chunks, window=4, ring_length=3)
    assert [r.lengths for r in rounds] == [(1, 48, 12, 5), (80, 68), (22,)]
    assert [r.num_decode for r in rounds] == [1, 0, 0]
    assert [r.starts.tolist() for r in rounds] == [[39, 0, 20, 0], [48, 32], [128]]
    assert [r.kept for r in rounds] == [
        (SlotCopy(1, KEPT[0]), SlotCopy(2, KEPT[2])),
        (SlotCopy(1, KEPT[1]),),
        (),
    ]
    rows = [np.arange(r.first, r.first + sum(r.lengths)) if r.rows is None else r.rows for r in rounds]
    assert rounds[2].rows is None, "one piece alone needs no row numbers"
    assert sorted(np.concatenate(rows).tolist()) == list(range(236))
    assert plan_rounds([chunks[0], chunks[3]], window=4, ring_length=3) == []
    with pytest.raises(AssertionError, match="not inside their chunks"):
        plan_rounds([chunk(1, 0, 32, first_block=1, splits=(Split(32, 9),))], window=4, ring_length=3)


def test_the_upload_has_room_for_as_many_pieces_as_there_can_be(folder: Path) -> None:
    """Eight tokens a sequence, each cut wherever it can be, with blocks of one token."""
    built = open_engine(folder)
    builder = built.runner._builder
    count = 30
    chunks = [
        Chunk(str(i), 0, 8, (1,), 1 + i, False, False, tuple(Split(1 + s, 99) for s in range(MAX_SPLITS)))
        for i in range(count)
    ]
    placed: list[int] = []

    def place(arrays: list[np.ndarray]) -> list[torch.Tensor]:
        placed.append(sum(-(-array.size // 2) * 2 for array in arrays))
        return [torch.from_numpy(array) for array in arrays]

    object.__setattr__(builder, "place", place)
    builder.build(chunks, [5] * (8 * count))
    assert placed[0] <= builder.upload_elements(max_seqs=count, max_tokens=8 * count)


def test_scratch_steps_with_splits_run_and_touch_scratch_alone(folder: Path) -> None:
    """What start-up runs to see how much memory split chunks take, rows that lie apart included."""
    settings = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "block_size": BLOCK, "num_blocks": 60}
    built = build_engine(folder, EngineConfig(memory_limit="2GiB", max_num_batched_tokens=80, **settings))
    built.pools.poison()
    steps = [step for step in largest_steps(built.config, longest=200) if step[0].splits]
    assert {len(step) for step in steps} == {1, 2}
    for step in steps:
        run_step(built.runner, step, vocab_size=built.config.model.vocab_size)
    for slot in range(1, built.pools.num_slots):
        assert all(bool(part.isnan().all()) for part in state(built, slot)), f"slot {slot} was written"
