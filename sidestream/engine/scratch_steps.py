"""Steps on scratch memory: what they consist of, and how one is run and sampled from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from sidestream.core.batch import SCRATCH_BLOCK, SCRATCH_SLOT, Chunk
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.logprobs import PROMPT_LOGIT_ROWS, top_logprobs
from sidestream.engine.runner import ModelRunner
from sidestream.engine.sampler import Sampler, SamplingRow

EVERYTHING = SamplingParams(
    temperature=0.7, top_p=0.9, min_p=0.01, presence_penalty=0.5, logit_bias={0: 1.0}, logprobs=8
)
"""Asks for all that the sampler can do at once."""


def scratch_chunk(block_size: int, start: int, length: int, *, decode: bool) -> Chunk:
    """Tokens of a sequence that lies in scratch memory."""
    blocks = (SCRATCH_BLOCK,) * -(-(start + length) // block_size)
    return Chunk("scratch", start, length, blocks, SCRATCH_SLOT, is_decode=decode, samples=False)


@torch.inference_mode()
def run_step(
    runner: ModelRunner, chunks: Sequence[Chunk], *, vocab_size: int, params: SamplingParams = EVERYTHING
) -> None:
    """Run the step and sample from the last row of each chunk; with log-probabilities, from its first rows too, and
    only without them are rows that nobody asks for left out.

    Decodes take their token from the device, as those do whose last token the host has not read yet.
    """
    tokens = sum(chunk.length for chunk in chunks)
    sources = [0 if chunk.is_decode else -1 for chunk in chunks for _ in range(chunk.length)]
    sampled = torch.zeros(len(chunks), dtype=torch.int64, device=runner.streams.backend.device)
    unread = any(chunk.is_decode for chunk in chunks)
    ends = [end - 1 for end in accumulate(chunk.length for chunk in chunks)]
    asked = ends if params.logprobs is None else None
    output = runner.forward(chunks, [0] * tokens, sources=sources if unread else None, sampled=sampled, asked=asked)
    sampler = Sampler(vocab_size)
    rows = [SamplingRow(params=params, seed=0, prompt_token_ids=(0,), output_token_ids=(0,))] * len(ends)
    logits = runner.logits(output, ends)
    choice = sampler.choose(logits, rows)
    if params.logprobs is not None:
        sampler.logprobs(logits, rows, choice.tokens.tolist())
        shown = range(min(tokens, PROMPT_LOGIT_ROWS))
        top_logprobs(runner.logits(output, shown), [0] * len(shown), params.logprobs)
