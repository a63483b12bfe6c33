"""The steps that need the most memory: run before the caches are sized, and again before the engine is ready."""

from __future__ import annotations

from dataclasses import replace

from sidestream.config.resolved import ResolvedConfig
from sidestream.core.batch import SCRATCH_SLOT, Chunk, Split
from sidestream.engine.scratch_steps import scratch_chunk


def largest_steps(config: ResolvedConfig, *, longest: int) -> tuple[tuple[Chunk, ...], ...]:
    """Batches of scratch sequences as large, and with contexts as long, as any step may have.

    Args:
        longest: tokens of the longest sequence.
    """
    tokens, sequences = config.max_num_batched_tokens, config.max_num_seqs

    def chunk(length: int, *, decode: bool) -> Chunk:
        return scratch_chunk(config.block_size, longest - length, length, decode=decode)

    def prefills(room: int, most: int, count: int) -> list[Chunk]:
        """``room`` tokens of at most ``count`` sequences, ``most`` of one at most."""
        lengths = [min(most, room - done) for done in range(0, room, most)][:count]
        return [chunk(length, decode=False) for length in lengths]

    decodes = [chunk(1, decode=True)] * sequences if longest > 1 else []
    each = min(longest, -(-tokens // sequences))
    steps = [prefills(tokens, longest, sequences), prefills(tokens, each, sequences)]
    if decodes:
        steps += [decodes[1:] + prefills(tokens - len(decodes) + 1, longest, 1), decodes]
    if config.prefix_caching and config.needs_snapshots:  # rows of a round are gathered if they lie apart
        halves = prefills(tokens, min(longest, -(-tokens // 2)), sequences)
        steps += [[_split(c, config.block_size) for c in chunks] for chunks in (halves, steps[0])]
    return tuple(tuple(step) for step in steps)


def _split(chunk: Chunk, block_size: int) -> Chunk:
    """The chunk, with a state kept behind the last block within it, if there is one."""
    place = (chunk.end - 1) // block_size * block_size
    return replace(chunk, splits=(Split(place, SCRATCH_SLOT),)) if place > chunk.start else chunk
