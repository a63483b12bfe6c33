"""Absorbed latent attention over the whole context, vectorised: decodes as padded batches, prefills one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sidestream.core.segment import Segment
from sidestream.ops.decode_groups import decode_length, group_decodes, scratch_of
from sidestream.ops.kv_rows.layout import KVRowLayout, unpack_rows


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
    scratch_bytes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from each token to every row of its sequence up to its own.

    Args:
        q: [T, H, r + p] float, the nope part taken through the key half of kv_b.
        pool: [blocks * block_size, row_elems] of ``layout.dtype``, this step's rows written already. Rows behind the
            end of a sequence never influence it, NaN or not; of later rows of its own step only finite ones are sure
            not to.
        block_table: [R, B] int64 or int32; entries behind a sequence's last block must name some block.
        segments: sequences in flat token order; the first ``num_decode`` have one length and consecutive rows of the
            block table.
        scale: of the softmax, which is fp32.
        scratch_bytes: bound on the scores of one inner step, None for the device's usual one. The gathered rows of one
            context come on top.
    Returns:
        out [T, H, r] of q's dtype and lse [T, H] fp32 (natural logarithm); 0 and -inf behind the segments' tokens.
    """
    tokens, heads, dim = q.shape
    latent = layout.latent_dim
    assert dim == latent + layout.rope_dim, f"queries of {dim}, rows of {latent} + {layout.rope_dim}"
    scratch = scratch_of(q, scratch_bytes)
    pages = pool.view(-1, block_size, layout.row_elems)
    length = decode_length(segments, num_decode)
    out = q.new_zeros(tokens, heads, latent)
    lse = torch.full((tokens, heads), -math.inf, dtype=torch.float32, device=q.device)
    ends = [segment.end_position for segment in segments[:num_decode]]
    entry_bytes = 4 * (dim + 2 * length * heads)
    for first, last, longest in group_decodes(ends, entry_bytes=entry_bytes):
        row = segments[first].sequence_row
        span = slice(first * length, last * length)
        table = block_table[row : row + last - first, : -(-longest // block_size)]
        kv = _gather(pages, table, layout)[:, :longest]
        out[span], lse[span] = _decode(q[span].float() * scale, kv, ends[first:last], latent=latent)
    for segment in segments[num_decode:]:
        start, end = segment.start_position, segment.end_position
        table = block_table[segment.sequence_row, None, : -(-end // block_size)]
        kv = _gather(pages, table, layout)[0, :end]
        run = max(1, scratch // (8 * heads * end))
        for first in range(0, segment.length, run):
            last = min(first + run, segment.length)
            span = slice(segment.token_start + first, segment.token_start + last)
            out[span], lse[span] = _prefill(q[span].float() * scale, kv[: start + last], latent=latent)
    return out, lse


def _gather(pages: torch.Tensor, table: torch.Tensor, layout: KVRowLayout) -> torch.Tensor:
    """[R, B * block_size, r + p] fp32 of blocks [R, B]."""
    rows = pages.index_select(0, table.reshape(-1)).view(table.shape[0], -1, layout.row_elems)
    return unpack_rows(rows, layout, dtype=torch.float32)


def _decode(
    q: torch.Tensor, kv: torch.Tensor, ends: Sequence[int], *, latent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled q [R * n, H, d] over kv [R, S, d]; the last of a sequence's n tokens sees ``ends`` rows."""
    tokens, heads, dim = q.shape
    sequences, size, _ = kv.shape
    length = tokens // sequences
    uneven = min(ends) < size
    place = torch.arange(size, device=q.device)
    if uneven:
        end = torch.tensor(ends, device=q.device)[:, None]
        kv.masked_fill_((place >= end)[:, :, None], 0.0)
    scores = torch.bmm(q.reshape(sequences, length * heads, dim), kv.transpose(1, 2))
    if uneven or length > 1:
        end = torch.tensor(ends, device=q.device)[:, None]
        limit = end - torch.arange(length - 1, -1, -1, device=q.device)
        scores.view(sequences, length, heads, size).masked_fill_((place >= limit[:, :, None])[:, :, None], -math.inf)
    weights = torch.softmax(scores, dim=2)
    lse = scores.amax(dim=2) - weights.amax(dim=2).log_()
    out = torch.bmm(weights, kv[:, :, :latent])
    return out.view(tokens, heads, latent), lse.view(tokens, heads)


def _prefill(q: torch.Tensor, kv: torch.Tensor, *, latent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled q [n, H, d], the last n positions of kv [S, d]."""
    tokens, heads, dim = q.shape
    size = kv.shape[0]
    scores = torch.mm(q.reshape(tokens * heads, dim), kv.t())
    if tokens > 1:
        ahead = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu_(1)
        scores.view(tokens, heads, size)[:, :, size - tokens :].masked_fill_(ahead[:, None, :], -math.inf)
    weights = torch.softmax(scores, dim=1)
    lse = scores.amax(dim=1) - weights.amax(dim=1).log_()
    out = torch.mm(weights, kv[:, :latent])
    return out.view(tokens, heads, latent), lse.view(tokens, heads)
