"""Dense MLA of mixed and prefill steps with the Triton kernels of sparse MLA: decodes together, chunks one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sidestream.core.segment import Segment
from sidestream.ops.decode_groups import decode_length
from sidestream.ops.dense_mla import torch_impl
from sidestream.ops.dense_mla.triton_decode import MAX_SPLITS
from sidestream.ops.kv_rows.layout import KVRowLayout
from sidestream.ops.sparse_mla.triton_launch import Launch, choose_launch, run, supported


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
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``torch_impl.dense_mla``, which also runs what the kernels do not support.

    Every decoding token runs like a row of ``dense_mla_decode``. A chunk's queries, tokens and heads in one line, are
    cut into blocks that read the sequence up to their last token, so 32 heads share a block of 64 with another token.
    The number of runs follows from a chunk's own length and end. ``scratch_bytes`` has no use here; ``launch``
    overrides the sizes chosen.
    """
    tokens, heads, dim = q.shape
    latent = layout.latent_dim
    assert dim == latent + layout.rope_dim, f"queries of {dim}, rows of {latent} + {layout.rope_dim}"
    if not supported(q, pool, layout) or not block_table.shape[1]:
        return torch_impl.dense_mla(
            q,
            pool,
            block_table=block_table,
            segments=segments,
            num_decode=num_decode,
            block_size=block_size,
            scale=scale,
            layout=layout,
            scratch_bytes=scratch_bytes,
        )
    length = decode_length(segments, num_decode)
    out = torch.empty(tokens, heads, latent, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    covered = sum(segment.length for segment in segments)
    out[covered:], lse[covered:] = 0.0, -math.inf
    if num_decode:
        count, row = num_decode * length, segments[0].sequence_row
        table = block_table[row : row + num_decode]
        _attend(
            q[:count],
            pool,
            table if length == 1 else table.repeat_interleave(length, 0),
            lengths=_lengths(segments[:num_decode], q.device),
            block_size=block_size,
            scale=scale,
            layout=layout,
            launch=launch,
            into=(out[:count], lse[:count]),
        )
    for segment in segments[num_decode:]:
        span = slice(segment.token_start, segment.token_start + segment.length)
        blocks = -(-segment.end_position // block_size)
        table = block_table[segment.sequence_row, None, :blocks]
        _attend(
            q[span],
            pool,
            table,
            lengths=None,
            block_size=block_size,
            scale=scale,
            layout=layout,
            launch=launch,
            chunk_start=segment.start_position,
            into=(out[span], lse[span]),
        )
    return out, lse


def _attend(
    q: torch.Tensor,
    pool: torch.Tensor,
    table: torch.Tensor,
    *,
    lengths: torch.Tensor | None,
    block_size: int,
    scale: float,
    layout: KVRowLayout,
    launch: Launch | None,
    into: tuple[torch.Tensor, torch.Tensor],
    chunk_start: int | None = None,
) -> None:
    tokens, heads, _ = q.shape
    places = table.shape[1] * block_size
    run(
        q,
        pool,
        table,
        lengths=table if lengths is None else lengths,
        block_size=block_size,
        scale=scale,
        layout=layout,
        launch=launch
        or choose_launch(tokens, heads, places, layout, MAX_SPLITS, paged=True, in_line=chunk_start is not None),
        chunk_start=chunk_start,
        into=into,
    )


def _lengths(segments: Sequence[Segment], device: torch.device) -> torch.Tensor:
    """[n] int64 rows that each token of the decodes sees, on their way to the device without a wait."""
    ends = [segment.start_position + i + 1 for segment in segments for i in range(segment.length)]
    return torch.tensor(ends, pin_memory=device.type == "cuda").to(device, non_blocking=True)
