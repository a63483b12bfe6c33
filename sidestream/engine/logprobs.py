"""Log-probabilities that a request asked for: of the model's raw logits, before penalties, bias and temperature."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sidestream.core.outputs import TopLogprobs

PROMPT_LOGIT_ROWS = 256
"""Rows of prompt logits held at once."""
SCRATCH_ELEMENTS = 1 << 22
"""Elements of the vocabulary-wide temporaries held at once."""


def top_logprobs(logits: torch.Tensor, chosen: Sequence[int], n: int | Sequence[int]) -> list[TopLogprobs]:
    """Log-probabilities of the ``n`` most likely tokens of each row and of the chosen one.

    A rank is the place in the vocabulary ordered by log-probability, equal ones by token id, from 1. (vLLM's default is
    the same except among exactly equal log-probabilities, where it counts the ties too.)

    Args:
        logits: [N, V] fp32, raw.
        chosen: N token ids.
        n: for all rows or one each; 0 gives the chosen token alone, more than V gives V.
    Returns:
        N rows of ``n`` entries if the chosen token is among the top n, else ``n + 1``.
    """
    rows, vocab = logits.shape
    counts = [n] * rows if isinstance(n, int) else list(n)
    assert len(chosen) == rows == len(counts), f"{len(chosen)} tokens and {len(counts)} counts for {rows} rows"
    result: list[TopLogprobs] = []
    size = max(1, SCRATCH_ELEMENTS // vocab)
    for start in range(0, rows, size):
        part = slice(start, start + size)
        result += _top_logprobs(logits[part], chosen[part], counts[part])
    return result


def _top_logprobs(logits: torch.Tensor, chosen: Sequence[int], counts: Sequence[int]) -> list[TopLogprobs]:
    vocab = logits.shape[1]
    logprobs = torch.log_softmax(logits, dim=-1)
    # the bits of a non-negative float are ordered as the float is: one integer orders by value, then by id
    place = torch.arange(vocab, device=logits.device)
    keys = (logprobs.abs().view(torch.int32).to(torch.int64) << 32) | place
    picked = torch.tensor(chosen, dtype=torch.int64, device=logits.device).unsqueeze(1)
    picked_ranks = (keys < keys.gather(1, picked)).sum(dim=1) + 1
    top = keys.topk(min(max(counts), vocab), dim=1, largest=False, sorted=True).values & 0xFFFFFFFF
    ids = torch.cat([picked, top], dim=1)
    host_values = logprobs.gather(1, ids).tolist()
    rows = zip(ids.tolist(), host_values, picked_ranks.tolist(), counts, strict=True)
    return [_row(tokens[: n + 1], values, rank) for tokens, values, rank, n in rows]


def _row(tokens: Sequence[int], values: Sequence[float], chosen_rank: int) -> TopLogprobs:
    chosen = tokens[0]
    others = ((tokens[i], values[i], i) for i in range(1, len(tokens)) if tokens[i] != chosen)
    return ((chosen, values[0], chosen_rank), *others)
