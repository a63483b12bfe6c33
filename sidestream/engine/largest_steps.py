"""The steps that need the most memory: run before the caches are sized, and again before the engine is ready."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sidestream.config.resolved import ResolvedConfig
from sidestream.core.batch import SCRATCH_BLOCK, SCRATCH_SLOT, Chunk
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.logprobs import PROMPT_LOGIT_ROWS, top_logprobs
from sidestream.engine.runner import ModelRunner
from sidestream.engine.sampler import Sampler, SamplingRow

SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, min_p=0.01, presence_penalty=0.5, logit_bias={0: 1.0}, logprobs=8)
"""Asks for everything that the sampler can do at once."""


def largest_steps(config: ResolvedConfig, *, longest: int) -> tuple[tuple[Chunk, ...], ...]:
    """Batches of scratch sequences as large, and with contexts as long, as any step may have.

    Args:
        longest: tokens of the longest sequence.
    """
    tokens, sequences = config.max_num_batched_tokens, config.max_num_seqs

    def chunk(length: int, *, decode: bool) -> Chunk:
        blocks = (SCRATCH_BLOCK,) * -(-longest // config.block_size)
        return Chunk("scratch", longest - length, length, blocks, SCRATCH_SLOT, is_decode=decode, samples=False)

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


@torch.inference_mode()
def run_step(runner: ModelRunner, chunks: Sequence[Chunk], *, vocab_size: int) -> None:
    """Run the step, sample from the last row of each chunk, and take log-probabilities of its first rows."""
    tokens = sum(chunk.length for chunk in chunks)
    output = runner.forward(chunks, [0] * tokens)
    sampler, ends, row = Sampler(vocab_size), [], 0
    for chunk in chunks:
        row += chunk.length
        ends.append(row - 1)
    rows = [SamplingRow(params=SAMPLED, seed=0, prompt_token_ids=(0,), output_token_ids=(0,))] * len(ends)
    logits = runner.logits(output, ends)
    choice = sampler.choose(logits, rows)
    sampler.logprobs(logits, rows, choice.tokens.tolist())
    if not all(chunk.is_decode for chunk in chunks):
        shown = range(min(tokens, PROMPT_LOGIT_ROWS))
        top_logprobs(runner.logits(output, shown), [0] * len(shown), SAMPLED.logprobs or 0)
