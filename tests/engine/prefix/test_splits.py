"""States kept inside a chunk are those of chunks that end there; whoever else is in the step does not notice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sidestream.attention.step_inputs import StepInputsBuilder
from sidestream.config.engine import EngineConfig
from sidestream.core.batch import Chunk, Split
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
    """A decode and two prompts, one of them going on, each with two states kept."""
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


def test_states_behind_multiples_of_64_tokens_change_no_bit(folder: Path) -> None:
    """As a prompt in blocks of 64 tokens leaves them: it gives the same whether others may take it over or not."""
    rows, left = [], []
    for splits in ((), (Split(64, KEPT[0]), Split(128, KEPT[1]))):
        built = open_engine(folder)
        rows.append(run(built, [chunk(1, 0, 150, first_block=20, splits=splits)]))
        left.append(state(built, 1))
        assert bool(state(built, KEPT[1])[0].isfinite().all()) == bool(splits)
    assert torch.equal(*rows)
    assert all(torch.equal(*pair) for pair in zip(*left, strict=True))


def test_inputs_say_what_is_kept_and_the_indexer_keeps_nothing() -> None:
    """Of one sequence, whose first token goes to a ring beside two that an earlier step left. Four tokens are a pool,
    too; its ring is that of a step without."""
    builder = StepInputsBuilder(block_size=BLOCK, conv_size=4, kpool=4, rollback=0)
    splits = (Split(32, KEPT[0]), Split(48, KEPT[1]))
    chunks = [chunk(3, 39, 1, first_block=1, decode=True), chunk(1, 31, 30, first_block=20, splits=splits)]
    made = builder.build(chunks, [5] * 31)
    plain = builder.build([chunks[0], replace(chunks[1], splits=())], [5] * 31)
    assert made.kept == ((), splits)
    assert plain.kept == ()
    assert made.conv is not None
    assert plain.conv is not None
    assert made.pools is not None
    assert made.pools.ring.keep_rows.tolist() == plain.conv.keep_rows.tolist()
    assert made.pools.ring.copy_to is None
    rows = made.conv.keep_rows.tolist()
    assert rows[:4] == plain.conv.keep_rows.tolist()
    first, second = 3 * KEPT[0], 3 * KEPT[1]
    assert dict(zip(rows[4:], made.conv.keep_tokens.tolist()[4:], strict=True)) == {
        first + 31 % 3: 1,
        second + 45 % 3: 15,
        second + 46 % 3: 16,
        second + 47 % 3: 17,
    }
    assert made.conv.copy_from is not None
    assert made.conv.copy_to is not None
    assert made.conv.copy_from.tolist() == [3 + 29 % 3, 3 + 30 % 3]
    assert made.conv.copy_to.tolist() == [first + 29 % 3, first + 30 % 3]
    with pytest.raises(AssertionError, match="a decode keeps no state"):
        builder.build([replace(chunks[0], splits=(Split(40, 9),))], [5])


@pytest.mark.parametrize(("block", "start"), [(1, 3), (16, 0)])
def test_the_upload_has_room_for_as_many_states_as_there_can_be(block: int, start: int) -> None:
    """Behind each block of every chunk; with blocks of one token from position 3 on, the first ones need copies."""
    length, count, window = 2 * block + 6, 30, 4
    builder = StepInputsBuilder(block_size=block, conv_size=window, kpool=1, rollback=0, max_blocks=9)
    places = [p for p in range(start + 1, start + length + 1) if p % block == 0]
    splits = tuple(Split(place, 99) for place in places)
    blocks = tuple(range(1, 2 + (start + length - 1) // block))
    chunks = [Chunk(str(i), start, length, blocks, 1 + i, False, False, splits) for i in range(count)]
    placed: list[int] = []

    def place_and_count(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        placed.append(sum(-(-array.size // 2) * 2 for array in arrays))
        return [torch.from_numpy(array) for array in arrays]

    made = replace(builder, place=place_and_count).build(chunks, [5] * (length * count))
    assert (made.conv is not None and made.conv.copy_to is not None) == (start > 0)
    assert placed[0] <= builder.upload_elements(max_seqs=count, max_tokens=length * count)


def test_scratch_steps_with_splits_run_and_touch_scratch_alone(folder: Path) -> None:
    """What start-up runs to see how much memory chunks take that leave a state behind each of their blocks."""
    settings = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "block_size": BLOCK, "num_blocks": 60}
    built = build_engine(folder, EngineConfig(memory_limit="2GiB", max_num_batched_tokens=80, **settings))
    built.pools.poison()
    steps = [step for step in largest_steps(built.config, longest=200) if step[0].splits]
    assert [len(chunk.splits) for step in steps for chunk in step] == [5]
    for step in steps:
        run_step(built.runner, step, vocab_size=built.config.model.vocab_size)
    for slot in range(1, built.pools.num_slots):
        assert all(bool(part.isnan().all()) for part in state(built, slot)), f"slot {slot} was written"
