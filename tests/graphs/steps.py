"""What the tests of step graphs share: steps of a made-up scheduler, laid out and uploaded as the engine does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sidestream.attention.step_inputs import StepInputsBuilder
from sidestream.core.batch import Chunk
from sidestream.streams import StreamBackend
from sidestream.streams.upload import PackedUpload

BLOCK_SIZE = 8


def step_builder(
    backend: StreamBackend, *, max_seqs: int, max_tokens: int, max_blocks: int = 4, conv_size: int = 4, kpool: int = 4
) -> StepInputsBuilder:
    """A builder with an upload of its own, sized by its own arithmetic."""
    builder = StepInputsBuilder(
        block_size=BLOCK_SIZE, conv_size=conv_size, kpool=kpool, rollback=0, max_blocks=max_blocks
    )
    upload = PackedUpload(backend, builder.upload_elements(max_seqs=max_seqs, max_tokens=max_tokens))
    return replace(builder, place=upload.place, capturable=True)


def decodes(starts: Sequence[int]) -> list[Chunk]:
    """One decode token a sequence, at the given positions; each sequence owns blocks and a slot."""
    return [chunk(row, start, 1, is_decode=True) for row, start in enumerate(starts)]


def chunk(row: int, start: int, length: int, *, is_decode: bool = False) -> Chunk:
    """Tokens of sequence ``row``, which owns enough blocks."""
    count = -(-(start + length) // BLOCK_SIZE)
    blocks = tuple(range(1 + 100 * row, 1 + 100 * row + count))
    return Chunk(f"r{row}", start, length, blocks, row + 1, is_decode=is_decode, samples=True)
