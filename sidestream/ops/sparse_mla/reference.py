"""Sparse MLA one token and head at a time: the truth."""

from __future__ import annotations

import math

import torch

from sidestream.ops.kv_rows.layout import KVRowLayout, unpack_rows


def sparse_mla(
    q: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    *,
    counts: torch.Tensor,
    scale: float,
    layout: KVRowLayout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, H, r] fp32 and lse [T, H] fp32."""
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, layout.latent_dim)
    lse = torch.full((tokens, heads), -math.inf)
    for t in range(tokens):
        count = int(counts[t])
        if count == 0:
            continue
        kv = torch.stack([unpack_rows(pool[int(row)], layout, dtype=torch.float32) for row in rows[t, :count]])
        for head in range(heads):
            scores = kv @ q[t, head].float() * scale
            top = scores.max()
            raw = (scores - top).exp()
            out[t, head] = raw @ kv[:, : layout.latent_dim] / raw.sum()
            lse[t, head] = top + raw.sum().log()
    return out, lse
