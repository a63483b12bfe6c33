"""Selection of the DSA indexer for uniform decodes: all sizes follow from shapes, so that it can be captured."""

from __future__ import annotations

import math

import torch

from sidestream.ops.decode_groups import scratch_of
from sidestream.ops.indexer.keys import rotate_leading
from sidestream.ops.indexer.torch_impl import write_everything, write_positions
from sidestream.ops.topk import pick_ascending


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
    scratch_bytes: int | None = None,
) -> None:
    """Select as ``select_topk`` does, for one token of each sequence, with nothing known on the host.

    Every entry that the block table has room for is scored, and what a row does not see is hidden afterwards. The
    scores' last bits may differ from ``select_topk``'s, as of any two products of other sizes; where they agree, so
    does the selection.

    Args:
        q: [R, Hi, D] float.
        weights: [R, Hi] float, without the positive factor that all share, which changes no order.
        keys: [blocks, block_size // kpool, D]; this step's own keys are written already. Entries behind what a row
            sees never influence it, NaN or not.
        block_table: [R, B] int64 or int32; entries behind a sequence's last block must name some block.
        context_lens: [R] int64, tokens of the sequence up to the row's own, that included; 0 for a padding row, which
            selects nothing.
        scale: of the products, positive; it changes no order, so this implementation leaves it out.
        out: [R, topk + kpool - 1] int32, any strides, all written: ascending positions, then -1.
        cos, sin: [R, at most D / 2] fp32 of queries whose first dimensions are still to be rotated; ``interleaved`` as
            for ``rope.apply_rope``.
        scratch_bytes: bound on gathered keys and products of one tile of blocks, None for the device's usual one.
            Scores and their order take 28 bytes an entry and row on top.
    """
    assert topk % kpool == 0, f"top-k of {topk} tokens is no whole number of pools of {kpool}"
    assert scale > 0, f"scale {scale} would change the order of scores"
    rows = q.shape[0]
    assert out.shape == (rows, topk + kpool - 1), f"top-k rows of {tuple(out.shape)}, need {(rows, topk + kpool - 1)}"
    assert context_lens.shape == (rows,), f"context lengths of {tuple(context_lens.shape)} for {rows} rows"
    position = context_lens[:, None] - 1
    if block_table.shape[1] * keys.shape[1] <= topk // kpool:
        write_everything(position, out=out)
        return
    q = rotate_leading(q, cos, sin, interleaved=interleaved).float()
    scores = _scores(q, weights.float().unsqueeze(1), keys, block_table, scratch_of(q, scratch_bytes))
    visible = context_lens[:, None] // kpool if kpool > 1 else context_lens[:, None]
    entry = torch.arange(scores.shape[1], device=scores.device)
    scores.masked_fill_(entry >= visible, math.nan)
    write_positions(pick_ascending(scores, topk // kpool), visible, position, kpool=kpool, out=out)


def _scores(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, block_table: torch.Tensor, scratch_bytes: int
) -> torch.Tensor:
    """[R, B * per_block] fp32 from q [R, Hi, D] and weights [R, 1, Hi], a tile of blocks at a time."""
    rows, heads, dim = q.shape
    per_block, blocks = keys.shape[1], block_table.shape[1]
    gathered = 0 if keys.dtype is torch.float32 else keys.element_size() * dim
    step = max(1, scratch_bytes // (rows * per_block * (gathered + 4 * (dim + heads))))
    scores = torch.empty(rows, blocks * per_block, dtype=torch.float32, device=q.device)
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        tile = keys.index_select(0, block_table[:, first:last].reshape(-1)).view(rows, -1, dim).float()
        similarity = torch.bmm(q, tile.transpose(1, 2)).relu_()
        scores[:, first * per_block : last * per_block] = torch.bmm(weights, similarity).squeeze(1)
    return scores
