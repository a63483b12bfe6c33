"""The indexer one token and one pool at a time: the truth."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sidestream.core.ring import RingPlan
from sidestream.core.segment import Segment
from sidestream.ops.norm.reference import layer_norm
from sidestream.ops.rope.reference import apply_rope
from sidestream.ops.topk.reference import topk_ascending


def normed_keys(
    k: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    norm_eps: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    interleaved: bool,
) -> torch.Tensor:
    """What ``write_normed_keys`` stores, [M, D]."""
    return rotated(layer_norm(k, norm_weight, norm_bias, eps=norm_eps), cos, sin, interleaved=interleaved)


def rotated(x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, *, interleaved: bool) -> torch.Tensor:
    """x [T, H, D] or [T, D] with its first dimensions rotated, as many as there are angles for."""
    if cos is None or sin is None:
        return x
    width = 2 * cos.shape[-1]
    return torch.cat([apply_rope(x[..., :width], cos, sin, interleaved=interleaved), x[..., width:]], dim=-1)


def pooled_keys(k: torch.Tensor, gate: torch.Tensor, ape: torch.Tensor) -> torch.Tensor:
    """Keys [L // kpool, D] of a whole sequence's complete pools from its raw k and gate [L, D] fp32."""
    kpool = ape.shape[0]
    out = []
    for first in range(0, k.shape[0] - kpool + 1, kpool):
        raw = (gate[first : first + kpool] + ape).exp()
        out.append((raw / raw.sum(dim=0) * k[first : first + kpool]).sum(dim=0))
    return torch.stack(out) if out else k.new_empty(0, k.shape[1])


def write_pools(
    k: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    *,
    tail: torch.Tensor,
    plan: RingPlan,
    keys_flat: torch.Tensor,
    entries: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_eps: float = 0.0,
) -> None:
    """As the fast path, one row after another; a pool that begins before its sequence is left out."""
    dim, carried = k.shape[1], plan.window - 1
    if norm_weight is not None and norm_bias is not None:
        k = layer_norm(k, norm_weight, norm_bias, eps=norm_eps)
    for row in range(k.shape[0]):
        members = plan.window_rows[row, :carried]
        ring = tail[plan.carry_rows[row * carried : (row + 1) * carried]].float()
        own = torch.cat([k[row], gate[row]])
        if bool((members > 0).all()):
            window = torch.cat([ring, own[None].float()])
            keys_flat[entries[row]] = (
                pooled_keys(window[:, :dim], window[:, dim:], ape)[0].to(k.dtype).to(keys_flat.dtype)
            )
        tail[plan.keep_rows[row]] = own.to(tail.dtype)


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, *, scale: float) -> torch.Tensor:
    """[T, E] fp32: sum over heads of weight * relu(scale * q . key)."""
    scores = torch.zeros(q.shape[0], keys.shape[0])
    for t in range(q.shape[0]):
        for head in range(q.shape[1]):
            scores[t] += weights[t, head] * torch.relu(scale * (keys.float() @ q[t, head].float()))
    return scores


def select_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    *,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    segments: Sequence[Segment],
    num_decode: int,
    topk: int,
    kpool: int,
    scale: float,
    out: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """As the fast path, for one token after another; ``num_decode`` does not matter here."""
    q = rotated(q, cos, sin, interleaved=interleaved)
    assert 0 <= num_decode <= len(segments)
    out.fill_(-1)
    per_block = keys.shape[1]
    for segment in segments:
        for t in range(segment.token_start, segment.token_start + segment.length):
            position = int(positions[t])
            visible = (position + 1) // kpool
            rows = [keys[int(block_table[segment.sequence_row, e // per_block]), e % per_block] for e in range(visible)]
            chosen: list[int] = []
            if rows:
                scores = index_scores(q[t : t + 1], weights[t : t + 1], torch.stack(rows), scale=scale)
                best = topk_ascending(scores, torch.tensor([visible]), topk // kpool)[0].tolist()
                chosen = [e * kpool + i for e in best if e >= 0 for i in range(kpool)]
            chosen += range(visible * kpool, position + 1)
            out[t, : len(chosen)] = torch.tensor(chosen, dtype=out.dtype)


def select_topk_decode(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    *,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    topk: int,
    kpool: int,
    scale: float,
    out: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """``select_topk`` of the last token of every context; nothing for a row without one."""
    q = rotated(q, cos, sin, interleaved=interleaved)
    lengths: list[int] = context_lens.tolist()
    for t, length in enumerate(lengths):
        one, row = slice(t, t + 1), out[t : t + 1]
        row.fill_(-1)
        if length:
            select_topk(
                q[one],
                weights[one],
                keys,
                block_table=block_table[one],
                positions=torch.tensor([length - 1]),
                segments=[Segment(0, 1, 0, length - 1)],
                num_decode=1,
                topk=topk,
                kpool=kpool,
                scale=scale,
                out=row,
            )
