"""Drawing tokens in few torch calls, for any device."""

from __future__ import annotations

import torch


def draw_tokens(logits: torch.Tensor, settings: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of a row, or the first at which the cumulative distribution, in the order of token ids,
    passes the row's uniform number: in fp64, so that neither rounding nor the order of a sort decides.

    Args:
        logits: [S, V] fp32; minus infinity is never drawn.
        settings: [2, S] fp64: temperatures, 0 for the most likely token; uniform numbers in [0, 1). None for the most
            likely token of every row.
    Returns:
        (tokens [S] int64, of equal logits the lowest id; the largest logit [S] fp32, NaN if a row holds one). Tokens of
        rows whose largest logit is not finite are ids without a meaning.
    """
    peaks, tokens = logits.max(dim=-1)  # the first of equal maxima
    if settings is None:
        return tokens, peaks
    temperature, share = settings.unsqueeze(2)
    drawn = temperature > 0.0
    weights = logits.double()
    weights -= peaks.double().unsqueeze(1)
    weights /= torch.where(drawn, temperature, 1.0)
    weights.exp_()  # 1 for the most likely token
    cumulative = weights.cumsum_(dim=-1)
    # the first token whose cumulative weight passes the target; it has weight, since the target is below the total
    found = torch.searchsorted(cumulative, cumulative[:, -1:] * share, right=True).clamp_max_(logits.shape[1] - 1)
    return torch.where(drawn, found, tokens.unsqueeze(1)).squeeze(1), peaks
