"""Padding rows of a step name scratch memory alone, whatever sequences stand before them."""

from __future__ import annotations

import pytest

from sidestream.attention.step_inputs import StepInputsBuilder
from sidestream.core.batch import SCRATCH_BLOCK, SCRATCH_SLOT, Chunk

BLOCK, KPOOL, ROWS = 8, 4, 8
BUILDER = StepInputsBuilder(block_size=BLOCK, conv_size=4, kpool=KPOOL, rollback=0, max_blocks=3, capturable=True)
IN_SCRATCH = range(SCRATCH_BLOCK * BLOCK, (SCRATCH_BLOCK + 1) * BLOCK)


def chunk(start: int, length: int, slot: int, *, decode: bool) -> Chunk:
    """Of a sequence whose blocks are 3 * slot and the two behind it."""
    blocks = tuple(range(3 * slot, 3 * slot + 3))[: -(-(start + length) // BLOCK)]
    return Chunk(str(slot), start, length, blocks, slot, decode, samples=False)


@pytest.mark.parametrize("lengths", [[3], [1, 4], [1, 1, 2], [1, 1, 1]])
def test_of_a_mixed_step(lengths: list[int]) -> None:
    chunks = [chunk(7 + i, length, 2 + i, decode=length == 1) for i, length in enumerate(lengths)]
    tokens = sum(lengths)
    inputs = BUILDER.build(chunks, range(tokens), rows=ROWS)
    assert inputs.num_tokens == tokens
    for mapping in (inputs.slot_mapping, inputs.key_mapping):
        own = {row // BLOCK for row in mapping[:tokens].tolist()}
        assert own <= {block for one in chunks for block in one.block_ids}
        assert set(mapping[tokens:].tolist()) <= set(IN_SCRATCH)
    assert set(inputs.token_rows[tokens:].tolist()) == {len(chunks)}
    assert set(inputs.block_table[len(chunks)].tolist()) == {SCRATCH_BLOCK}


@pytest.mark.parametrize("tokens", range(ROWS))
def test_of_a_uniform_decode(tokens: int) -> None:
    chunks = [chunk(7 + i, 1, 2 + i, decode=True) for i in range(tokens)]
    inputs = BUILDER.build_uniform(chunks, range(tokens), rows=ROWS)
    assert inputs.slots.tolist() == [2 + i for i in range(tokens)] + [SCRATCH_SLOT] * (ROWS - tokens)
    assert inputs.context_lens is not None
    assert inputs.context_lens[tokens:].tolist() == [0] * (ROWS - tokens)
    assert set(inputs.slot_mapping[tokens:].tolist()) <= set(IN_SCRATCH)
    assert set(inputs.key_mapping[tokens:].tolist()) <= set(IN_SCRATCH)
    assert set(inputs.block_table[tokens:].flatten().tolist()) == {SCRATCH_BLOCK}
    assert inputs.pools is not None
    per_block = BLOCK // KPOOL
    assert {entry // per_block for entry in inputs.pools.entries[tokens:].tolist()} == {SCRATCH_BLOCK}
