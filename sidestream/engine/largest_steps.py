"""The steps that need the most memory: run before the caches are sized, and again before the engine is ready."""

from __future__ import annotations

from sidestream.config.resolved import ResolvedConfig
from sidestream.core.batch import Chunk
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
    return tuple(tuple(step) for step in steps)
