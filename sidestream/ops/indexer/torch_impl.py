"""Scores and selection of the DSA indexer, vectorised: decodes as padded batches, prefills in runs of queries."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from sidestream.core.segment import Segment
from sidestream.ops.decode_groups import decode_length, group_decodes, scratch_of
from sidestream.ops.indexer.keys import rotate_leading
from sidestream.ops.topk import pick_ascending

NUMPY_TOKENS = 32
"""Tokens up to which numpy turns picked entries into positions, on a CPU."""
_KEY_BYTES = 24
"""Temporaries of top-k a score: 32-bit order, 64-bit key and their copies."""


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Score every key for every query: sum over heads of ``weight * relu(scale * q . key)``, fp32.

    Formula of the indexers of the hub models ``deepseek_v32``, ``glm_moe_dsa`` and ``glm5_next``. ``scale`` is
    positive, so it may be applied to the weights.

    Args:
        q: [T, Hi, D] float.
        weights: [T, Hi] fp32, times Hi ** -0.5 already.
        keys: [E, D] float.
    Returns:
        [T, E] fp32. A NaN key makes its own column NaN and no other.
    """
    return _score(q.float(), (weights * scale).unsqueeze(1), keys.float())


def _score(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[T, E] from q [T, Hi, D], weights [T, 1, Hi] and keys [E, D], all fp32."""
    tokens, heads, dim = q.shape
    similarity = torch.mm(q.reshape(tokens * heads, dim), keys.t()).relu_()
    return torch.bmm(weights, similarity.view(tokens, heads, -1)).squeeze(1)


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
    scratch_bytes: int | None = None,
) -> None:
    """Select the token positions that each token attends to.

    An entry is a pool of ``kpool`` tokens (one token if that is 1), and visible once its last token is at or before
    the query. The ``topk // kpool`` best by ``index_scores`` are taken, ties to the lowest, and the tokens of the
    query's own unfinished pool follow. Where a query sees no more entries than are taken, nothing is scored.

    Args:
        q: [T, Hi, D] float.
        weights: [T, Hi] float, without the positive factor that all share, which changes no order.
        keys: [blocks, block_size // kpool, D]; this step's own keys are written already. Entries behind what a query
            sees never influence it, NaN or not.
        block_table: [R, B] int64 or int32; entries behind a sequence's last block must name some block.
        positions: [T] int64.
        segments: sequences in flat token order; the first ``num_decode`` have one length and consecutive rows of the
            block table.
        scale: of the products, positive; it changes no order, so this implementation leaves it out.
        out: [rows, topk + kpool - 1] int32, any strides, all written: ascending positions, then -1; rows behind the
            last segment's tokens are -1.
        cos, sin: [T, at most D / 2] fp32 of queries whose first dimensions are still to be rotated; ``interleaved`` as
            for ``rope.apply_rope``.
        scratch_bytes: bound on the temporaries of one inner step, None for the device's usual one. The gathered keys of
            a prefill's whole context come on top.
    """
    assert topk % kpool == 0, f"top-k of {topk} tokens is no whole number of pools of {kpool}"
    assert scale > 0, f"scale {scale} would change the order of scores"
    assert out.shape[1] == topk + kpool - 1, f"top-k rows of {out.shape[1]}, need {topk + kpool - 1}"
    scratch = scratch_of(q, scratch_bytes)
    # Bits of products may depend on strides.
    q = rotate_leading(q, cos, sin, interleaved=interleaved).contiguous()
    weights = weights.float().contiguous()
    select = _Selection(q, weights, keys, block_table, positions, topk // kpool, kpool, out, scratch)
    length = decode_length(segments, num_decode)
    visible = [segment.end_position // kpool for segment in segments[:num_decode]]
    heads, dim = q.shape[1], q.shape[2]
    entry_bytes = 4 * (2 * dim + length * heads) + length * _KEY_BYTES
    for first, last, entries in group_decodes(visible, entry_bytes=entry_bytes):
        rows = slice(segments[first].token_start, segments[first].token_start + (last - first) * length)
        if entries <= select.picks:
            select.everything(rows)
        else:
            table = block_table[segments[first].sequence_row :][: last - first]
            sure = min((segment.start_position + 1) // kpool for segment in segments[first:last])
            select.decodes(rows, table, entries=entries, sure=sure, entry_bytes=entry_bytes)
    for segment in segments[num_decode:]:
        select.prefill(segment)
    done = segments[-1].token_start + segments[-1].length if segments else 0
    if done < out.shape[0]:
        out[done:].fill_(-1)


def write_everything(position: torch.Tensor, *, out: torch.Tensor) -> None:
    """Fill rows of ``out`` [T, W] with all positions up to ``position`` [T, 1], -1 behind; none where that is -1."""
    place = torch.arange(out.shape[1], device=out.device)
    out.copy_(torch.where(place <= position, place, -1))


def write_positions(
    picked: torch.Tensor, visible: torch.Tensor, position: torch.Tensor, *, kpool: int, out: torch.Tensor
) -> None:
    """Fill rows of ``out`` [T, W] with the tokens of picked entries, then those of the unfinished pool, -1 behind.

    Args:
        picked: [T, picks] int64 entries, ascending, changed; those that are not visible come last.
        visible: [T, 1] entries that the row sees.
        position: [T, 1] of the row's own token, the last to be written.
    """
    if kpool > 1:
        # A row with fewer visible entries than picks goes on with the next numbers, so that what it picked is all
        # its positions and more. The unfinished pool is the entry behind the last visible one.
        unfinished = visible.clamp_min(picked.shape[1])
        place = torch.arange(kpool, device=picked.device)
        picked = torch.cat([picked, unfinished], dim=1)
        picked = torch.add(place, picked[:, :, None], alpha=kpool).flatten(1)[:, : out.shape[1]]
    out.copy_(picked.masked_fill_(picked > position, -1))


class _Selection:
    """The arguments of one ``select_topk`` call, and its pieces."""

    def __init__(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
        block_table: torch.Tensor,
        positions: torch.Tensor,
        picks: int,
        kpool: int,
        out: torch.Tensor,
        scratch_bytes: int,
    ) -> None:
        self.q = q
        self.weights = weights
        self.keys = keys
        self.block_table = block_table
        self.positions = positions
        self.picks = picks
        self.kpool = kpool
        self.out = out
        self.scratch_bytes = scratch_bytes

    def everything(self, rows: slice) -> None:
        """Tokens that see at most ``picks`` entries take every position up to their own."""
        write_everything(self.positions[rows, None], out=self.out[rows])

    def decodes(self, rows: slice, table: torch.Tensor, *, entries: int, sure: int, entry_bytes: int) -> None:
        """Tokens of ``table.shape[0]`` sequences, an equal number each, that see ``sure`` to ``entries`` entries."""
        sequences, per_block = table.shape[0], self.keys.shape[1]
        q = self.q[rows].float()
        tokens, heads, dim = q.shape
        queries = q.reshape(sequences, tokens // sequences * heads, dim)
        weights = self.weights[rows].unsqueeze(1)
        blocks = -(-entries // per_block)
        step = max(1, self.scratch_bytes // (sequences * per_block * entry_bytes))
        parts = []
        for start in range(0, blocks, step):
            part = table[:, start : min(start + step, blocks)].reshape(-1)
            keys = self.keys.index_select(0, part).view(sequences, -1, dim).float()
            similarity = torch.bmm(queries, keys.transpose(1, 2)).relu_()
            parts.append(torch.bmm(weights, similarity.view(tokens, heads, -1)).squeeze(1))
        scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        self._take(rows, scores[:, :entries], sure=sure)

    def prefill(self, segment: Segment) -> None:
        """Tokens of one sequence."""
        start, length = segment.start_position, segment.length
        # The first positions see no more than picks whole entries and an unfinished one.
        trivial = min(max((self.picks + 1) * self.kpool - 1 - start, 0), length)
        if trivial:
            self.everything(slice(segment.token_start, segment.token_start + trivial))
        if trivial == length:
            return
        per_block = self.keys.shape[1]
        heads, dim = self.q.shape[1], self.q.shape[2]
        entries = segment.end_position // self.kpool
        blocks = self.block_table[segment.sequence_row, : -(-entries // per_block)]
        keys = self.keys.index_select(0, blocks).view(-1, dim).float()
        run = max(1, self.scratch_bytes // (entries * (4 * heads + _KEY_BYTES)))
        for first in range(trivial, length, run):
            last = min(first + run, length)
            rows = slice(segment.token_start + first, segment.token_start + last)
            visible = (start + last) // self.kpool
            weights = self.weights[rows].unsqueeze(1)
            scores = _score(self.q[rows].float(), weights, keys[:visible])
            self._take(rows, scores, sure=(start + first + 1) // self.kpool)

    def _take(self, rows: slice, scores: torch.Tensor, *, sure: int) -> None:
        """Write the selection of tokens that all see the first ``sure`` of ``scores`` [T, E > picks]; changes them."""
        if scores.device.type == "cpu" and scores.shape[0] <= NUMPY_TOKENS:
            self._take_numpy(rows, scores, sure)
            return
        position, kpool, out = self.positions[rows, None], self.kpool, self.out[rows]
        visible = (position + 1) // kpool if kpool > 1 else position + 1
        if sure < scores.shape[1]:
            entry = torch.arange(sure, scores.shape[1], device=scores.device)
            scores[:, sure:].masked_fill_(entry >= visible, math.nan)
        write_positions(pick_ascending(scores, self.picks), visible, position, kpool=kpool, out=out)

    def _take_numpy(self, rows: slice, scores: torch.Tensor, sure: int) -> None:
        """``_take`` for few tokens: numpy's calls cost a third of torch's."""
        position, kpool, out = self.positions.numpy()[rows, None], self.kpool, self.out.numpy()[rows]
        visible = (position + 1) // kpool
        if sure < scores.shape[1]:
            hidden = np.arange(sure, scores.shape[1]) >= visible
            np.copyto(scores.numpy()[:, sure:], np.float32(math.nan), where=hidden)
        picked = pick_ascending(scores, self.picks).numpy()
        if kpool > 1:
            entries = np.empty((picked.shape[0], self.picks + 1), dtype=np.int64)
            entries[:, :-1] = picked
            np.maximum(visible[:, 0], self.picks if sure < self.picks else 0, out=entries[:, -1])
            spread = entries[:, :, None] * kpool + np.arange(kpool)
            picked = spread.reshape(picked.shape[0], -1)[:, : out.shape[1]]
        out[:] = np.where(picked > position, -1, picked)
