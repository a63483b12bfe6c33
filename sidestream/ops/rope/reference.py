"""The rotation as two plain formulas (``apply_rotary_pos_emb*`` of transformers' ``deepseek_v32``)."""

from __future__ import annotations

import torch


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate pair by pair, in fp32. See ``torch_impl.apply_rope``."""
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for pair in range(half):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        c, s = cos[:, pair], sin[:, pair]
        if x.dim() == 3:
            c, s = c[:, None], s[:, None]
        a, b = x[..., first].float(), x[..., second].float()
        out[..., first] = a * c - b * s
        out[..., second] = b * c + a * s
    return out.to(x.dtype)


def apply_rope_pair(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    """One, then the other. See ``torch_impl.apply_rope_pair``."""
    out[:] = apply_rope(query, cos, sin, interleaved=interleaved)
    return apply_rope(key, cos, sin, interleaved=interleaved)
