"""Absorbed latent attention of uniform decodes over their whole contexts, in tiles whose number follows from shapes."""

from __future__ import annotations

import math

import torch

from sidestream.ops.decode_groups import scratch_of
from sidestream.ops.kv_rows.layout import KVRowLayout, unpack_rows


def dense_mla_decode(
    q: torch.Tensor,
    pool: torch.Tensor,
    *,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    block_size: int,
    scale: float,
    layout: KVRowLayout,
    scratch_bytes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from one token of each sequence to all its rows, with nothing known on the host, so it can be captured.

    The context is read in tiles of blocks, and a running maximum rescales what earlier tiles gave (online softmax,
    Milakov and Gimelshein 2018).

    Args:
        q: [R, H, r + p] float, the nope part taken through the key half of kv_b.
        pool: [blocks * block_size, row_elems] of ``layout.dtype``, this step's rows written already. Rows behind a
            context never influence it, NaN or not.
        block_table: [R, B] int64 or int32; entries behind a sequence's last block must name some block.
        context_lens: [R] int64, tokens of the sequence up to the row's own, that included; 0 for a padding row.
        scale: of the softmax, which is fp32.
        scratch_bytes: bound on the temporaries of one tile, None for the device's usual one.
    Returns:
        out [R, H, r] of q's dtype and lse [R, H] fp32 (natural logarithm); 0 and -inf for a padding row.
    """
    sequences, heads, dim = q.shape
    latent, blocks = layout.latent_dim, block_table.shape[1]
    assert dim == latent + layout.rope_dim, f"queries of {dim}, rows of {latent} + {layout.rope_dim}"
    assert context_lens.shape == (sequences,), f"context lengths of {tuple(context_lens.shape)} for {sequences} rows"
    gathered = 0 if layout.dtype is torch.float32 else layout.row_bytes
    entry_bytes = gathered + 4 * (dim + 3 * heads)
    step = max(1, scratch_of(q, scratch_bytes) // (sequences * block_size * entry_bytes))
    end, first_row = context_lens[:, None], block_table[:, :1] * block_size
    query = q.float() * scale
    top = torch.full((sequences, heads, 1), -math.inf, dtype=torch.float32, device=q.device)
    total = torch.zeros(sequences, heads, 1, dtype=torch.float32, device=q.device)
    out = torch.zeros(sequences, heads, latent, dtype=torch.float32, device=q.device)
    offset = torch.arange(block_size, device=q.device)
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        rows = torch.add(offset, block_table[:, first:last, None], alpha=block_size).view(sequences, -1)
        hidden = torch.arange(first * block_size, last * block_size, device=q.device) >= end
        # Hidden places repeat the sequence's first row, so that nothing unseen is gathered and no pass zeroes it.
        rows = torch.where(hidden, first_row, rows)
        kv = unpack_rows(pool.index_select(0, rows.view(-1)), layout, dtype=torch.float32)
        kv = kv.view(sequences, -1, dim)
        bias = torch.where(hidden, -math.inf, 0.0).unsqueeze(1)
        scores = torch.baddbmm(bias, query, kv.transpose(1, 2))
        # Not -inf from the first tile on: that one holds a place which is seen, but for padding rows.
        higher = torch.maximum(top, scores.amax(dim=2, keepdim=True))
        kept = torch.exp(top - higher)
        weights = scores.sub_(higher).exp_()
        total = torch.addcmul(weights.sum(dim=2, keepdim=True), total, kept)
        out = torch.baddbmm(out.mul_(kept), weights, kv[:, :, :latent])
        top = higher
    empty = (end == 0).unsqueeze(2)
    out = out.div_(total).masked_fill_(empty, 0.0)
    lse = top.add_(total.log_()).masked_fill_(empty, -math.inf)
    return out.to(q.dtype), lse.squeeze(2)
