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
    if config.prefix_caching and config.needs_snapshots:  # a kept state ends a chunk of KDA, so there are more of them
        steps.append([_leaving_states(chunk, config.block_size) for chunk in steps[0]])
    return tuple(tuple(step) for step in steps)


def _leaving_states(chunk: Chunk, block_size: int) -> Chunk:
    """The chunk, with a state kept behind each block within it."""
    first = chunk.start // block_size * block_size + block_size
    places = range(first, chunk.end, block_size)
    return replace(chunk, splits=tuple(Split(place, SCRATCH_SLOT) for place in places))
