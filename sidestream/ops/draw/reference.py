"""Drawing tokens one row and one token at a time, in fp64: the truth."""

from __future__ import annotations

import math

import torch


def draw_tokens(logits: torch.Tensor, settings: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk along the vocabulary until the weights pass the row's share. See ``torch_impl.draw_tokens``."""
    rows: list[list[float]] = logits.double().tolist()
    tokens = []
    for i, row in enumerate(rows):
        temperature, share = (0.0, 0.0) if settings is None else settings[:, i].tolist()
        best = max(row)
        if temperature == 0.0:
            tokens.append(row.index(best))
            continue
        weights = [math.exp((logit - best) / temperature) for logit in row]
        target, passed = share * math.fsum(weights), [math.fsum(weights[: t + 1]) for t in range(len(row))]
        tokens.append(next(t for t, reached in enumerate(passed) if reached > target))
    return torch.tensor(tokens), torch.tensor([max(row) for row in rows], dtype=torch.float32)
