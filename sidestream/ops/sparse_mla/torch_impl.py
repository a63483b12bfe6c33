"""Absorbed latent attention over selected rows, vectorised."""

from __future__ import annotations

import math

import torch

from sidestream.core.padding import pad_rows
from sidestream.ops.decode_groups import scratch_of
from sidestream.ops.kv_rows.layout import KVRowLayout, unpack_rows


def sparse_mla(
    q: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    *,
    counts: torch.Tensor,
    scale: float,
    layout: KVRowLayout,
    with_lse: bool = True,
    scratch_bytes: int | None = None,
    out_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend from each token to its own rows: keys are whole rows, values their latents (one for all heads).

    Args:
        q: [T, H, r + p] float, the nope part taken through the key half of kv_b.
        pool: [N, row_elems] of ``layout.dtype``. Rows that no token selected are never used, NaN or not.
        rows: [T, W] int64 or int32, a valid prefix, then -1.
        counts: [T] int32, entries of the prefix; 0 for padding tokens. It is for implementations that loop over
            entries; this one goes by the -1.
        scale: of the softmax, which is fp32.
        with_lse: False spares what nobody will merge with another part's result.
        scratch_bytes: bound on the temporaries of one inner step, met by splitting T; None is the device's usual one.
        out_rows: of ``out``, T at least; None for T.
    Returns:
        out [out_rows, H, r] of q's dtype, zeros behind the first T, and lse [T, H] fp32 (natural logarithm); 0 and -inf
        for a token without rows. None in place of an lse not wanted.
    """
    tokens, heads, dim = q.shape
    width, latent = rows.shape[1], layout.latent_dim
    assert counts.shape == (tokens,), f"counts of {tuple(counts.shape)} for {tokens} tokens"
    assert dim == latent + layout.rope_dim, f"queries of {dim}, rows of {latent} + {layout.rope_dim}"
    per_token = 4 * width * (dim + 2 * heads) + (width * layout.row_bytes if layout.dtype != torch.float32 else 0)
    run = max(1, scratch_of(q, scratch_bytes) // per_token)
    size = tokens if out_rows is None else out_rows
    if tokens <= run:
        out, lse = _attend(q, pool, rows, scale=scale, layout=layout, with_lse=with_lse)
        return pad_rows(out, size), lse
    out = q.new_empty(size, heads, latent)
    out[tokens:].zero_()
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device) if with_lse else None
    for first in range(0, tokens, run):
        part = slice(first, first + run)
        out[part], part_lse = _attend(q[part], pool, rows[part], scale=scale, layout=layout, with_lse=with_lse)
        if lse is not None and part_lse is not None:
            lse[part] = part_lse
    return out, lse


def _attend(
    q: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor, *, scale: float, layout: KVRowLayout, with_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    tokens, width = rows.shape
    hidden = rows < 0
    # Hidden entries repeat the token's first row: nothing unselected is gathered, so no pass is spent on zeroing it.
    # Only a token without rows reads one it did not select, and its result is replaced.
    safe = torch.where(hidden, rows[:, :1], rows).clamp_min_(0)
    kv = unpack_rows(pool.index_select(0, safe.view(-1)), layout, dtype=torch.float32)
    kv = kv.view(tokens, width, layout.latent_dim + layout.rope_dim)
    bias = torch.where(hidden, -math.inf, 0.0).unsqueeze(1)
    scores = torch.baddbmm(bias, q.float(), kv.transpose(1, 2), alpha=scale)
    weights = torch.softmax(scores, dim=2)
    out = torch.bmm(weights, kv[:, :, : layout.latent_dim])
    empty = hidden[:, :1]
    out.masked_fill_(empty.unsqueeze(2), 0.0)
    if not with_lse:
        return out.to(q.dtype), None
    # The largest weight is 1 / sum(exp(score - max)): log-sum-exp without another pass of exponentials.
    lse = scores.amax(dim=2) - weights.amax(dim=2).log_()
    return out.to(q.dtype), lse.masked_fill_(empty, -math.inf)
