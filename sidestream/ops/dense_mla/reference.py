"""Dense MLA one token at a time: the truth."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sidestream.core.segment import Segment
from sidestream.ops.kv_rows.layout import KVRowLayout
from sidestream.ops.sparse_mla.reference import sparse_mla


def dense_mla(
    q: torch.Tensor,
    pool: torch.Tensor,
    *,
    block_table: torch.Tensor,
    segments: Sequence[Segment],
    num_decode: int,
    block_size: int,
    scale: float,
    layout: KVRowLayout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, H, r] fp32 and lse [T, H] fp32: sparse MLA with every row up to the token's own selected."""
    assert 0 <= num_decode <= len(segments)
    out = torch.zeros(q.shape[0], q.shape[1], layout.latent_dim)
    lse = torch.full(q.shape[:2], -math.inf)
    for segment in segments:
        for i in range(segment.length):
            t, count = segment.token_start + i, segment.start_position + i + 1
            rows = [
                int(block_table[segment.sequence_row, p // block_size]) * block_size + p % block_size
                for p in range(count)
            ]
            one_out, one_lse = sparse_mla(
                q[t : t + 1],
                pool,
                torch.tensor([rows]),
                counts=torch.tensor([count]),
                scale=scale,
                layout=layout,
            )
            out[t], lse[t] = one_out[0], one_lse[0]
    return out, lse


def dense_mla_decode(
    q: torch.Tensor,
    pool: torch.Tensor,
    *,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    block_size: int,
    scale: float,
    layout: KVRowLayout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``dense_mla`` of the last token of every context; 0 and -inf for a row without one."""
    out = torch.zeros(q.shape[0], q.shape[1], layout.latent_dim)
    lse = torch.full(q.shape[:2], -math.inf)
    lengths: list[int] = context_lens.tolist()
    for t, length in enumerate(lengths):
        if length:
            one_out, one_lse = dense_mla(
                q[t : t + 1],
                pool,
                block_table=block_table[t : t + 1],
                segments=[Segment(0, 1, 0, length - 1)],
                num_decode=1,
                block_size=block_size,
                scale=scale,
                layout=layout,
            )
            out[t], lse[t] = one_out[0], one_lse[0]
    return out, lse
