"""Steps of every kind and many sizes, so that whatever kernel a request needs was compiled before it came.

Kernels are chosen, and compiled, by how many tokens, sequences and blocks a step has: by classes of their launch
tables, and, as Triton specialises, by whether a number is 1 or divides by 16. Captures run padded sizes on scratch
memory; what they do not meet is met here.
"""

from __future__ import annotations

from collections.abc import Iterator

from sidestream.config.resolved import ResolvedConfig
from sidestream.core.batch import Chunk
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.scratch_steps import EVERYTHING, scratch_chunk

SMALL = 64
"""Up to here every mix of a size is run, beyond it a few."""
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01),
    EVERYTHING,
)


def compile_steps(config: ResolvedConfig, *, longest: int) -> Iterator[tuple[tuple[Chunk, ...], SamplingParams]]:
    """Batches of scratch sequences, and how to sample from each.

    Args:
        longest: tokens of the longest sequence.
    """
    most = min(config.max_num_batched_tokens, config.max_num_seqs * longest)
    large = [size for power in range(7, 14) for size in (1 << power, (1 << power) - 3)]
    counts = sorted({*_sizes(SMALL), *large, most})
    ends = (longest, min(longest, 16 * config.block_size))  # block tables of any width, and of one that divides by 16
    batches = [
        batch
        for number, tokens in enumerate(size for size in counts if size <= most)
        for batch in _mixes(config, tokens, longest, end=max(ends[number % 2], min(tokens, longest)))
    ]
    batches += list(_contexts(config, longest))
    batches += list(_decodes(config, longest))
    for number, batch in enumerate(batches):
        yield batch, SAMPLINGS[number % len(SAMPLINGS)]
    for number, params in enumerate(SAMPLINGS):  # each with one row and with several
        yield batches[0], params
        yield batches[-1 - number % 2], params


def _sizes(most: int) -> list[int]:
    return [size for size in (1, 2, 3, 5, 8, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64) if size <= most]


def _mixes(config: ResolvedConfig, tokens: int, longest: int, *, end: int) -> Iterator[tuple[Chunk, ...]]:
    """Prefills of so many tokens: fresh and continued up to ``end``, one and several, alone and behind decodes."""
    block_size, sequences = config.block_size, config.max_num_seqs

    def prefill(length: int, *, deep: bool) -> Chunk:
        return scratch_chunk(block_size, end - length if deep else 0, length, decode=False)

    def split(count: int, room: int, *, deep: bool) -> tuple[Chunk, ...]:
        """``count`` sequences of about equal lengths; fewer tokens where that many are too long."""
        lengths = [min(longest, room // count + (i < room % count)) for i in range(count)]
        return tuple(prefill(length, deep=deep) for length in lengths if length)

    shallow, deep = (scratch_chunk(block_size, start - 1, 1, decode=True) for start in (min(2, longest), longest))
    fits = -(-tokens // longest)
    if fits <= sequences:
        yield split(fits, tokens, deep=False)
        yield split(fits, tokens, deep=True)
    if tokens > 1 and longest > 1 and fits < sequences:
        yield (deep, *split(max(1, -(-(tokens - 1) // longest)), tokens - 1, deep=False))
    if tokens <= SMALL and longest > 1:
        some = min(sequences - 1, 16, tokens - 1)
        if some > 1 and tokens > some:
            yield (*[shallow] * some, *split(1, tokens - some, deep=True))
        several = min(sequences, 3, tokens)
        if several > 1:
            yield split(several, tokens, deep=True)


def _contexts(config: ResolvedConfig, longest: int) -> Iterator[tuple[Chunk, ...]]:
    """A decode and a few tokens of a prompt with every class of context behind them: how rows are selected from follows
    from the longest context of a step."""
    few = min(4, config.max_num_batched_tokens - 1, longest - 1)
    if few < 1 or config.max_num_seqs < 2:
        return
    end = config.block_size
    while end < 2 * longest:
        context = max(min(end, longest), few + 1)
        decode = scratch_chunk(config.block_size, context - 1, 1, decode=True)
        yield decode, scratch_chunk(config.block_size, context - few, few, decode=False)
        end *= 2


def _decodes(config: ResolvedConfig, longest: int) -> Iterator[tuple[Chunk, ...]]:
    """Uniform decodes with short and with long contexts."""
    if longest < 2:
        return
    for count in [*_sizes(min(SMALL, config.max_num_seqs)), config.max_num_seqs]:
        for end in (2, longest):
            yield (scratch_chunk(config.block_size, end - 1, 1, decode=True),) * count
