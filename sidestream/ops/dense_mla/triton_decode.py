"""Dense MLA of uniform decodes with the Triton kernels of sparse MLA, rows following from the block table."""

from __future__ import annotations

import torch

from sidestream.ops.dense_mla import decode
from sidestream.ops.kv_rows.layout import KVRowLayout
from sidestream.ops.sparse_mla.triton_launch import Launch, choose_launch, run, supported

MAX_SPLITS = 128
"""Runs a sequence at most: one long context alone fills the device with them."""


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
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``decode.dense_mla_decode``, which also runs what the kernels do not support.

    The number of runs a context is cut into follows from the padded row count, the heads and the width of the block
    table; the runs themselves from the row's own length, so a row's bits do not depend on other rows. Programs for runs
    behind a context leave at once. ``scratch_bytes`` has no use here; ``launch`` overrides the sizes chosen.
    """
    sequences, heads, dim = q.shape
    assert dim == layout.latent_dim + layout.rope_dim, (
        f"queries of {dim}, rows of {layout.latent_dim + layout.rope_dim}"
    )
    assert context_lens.shape == (sequences,), f"context lengths of {tuple(context_lens.shape)} for {sequences} rows"
    if not supported(q, pool, layout) or not block_table.shape[1]:
        return decode.dense_mla_decode(
            q,
            pool,
            block_table=block_table,
            context_lens=context_lens,
            block_size=block_size,
            scale=scale,
            layout=layout,
            scratch_bytes=scratch_bytes,
        )
    places = block_table.shape[1] * block_size
    sizes = launch or choose_launch(sequences, heads, places, layout, MAX_SPLITS, paged=True)
    return run(
        q, pool, block_table, lengths=context_lens, block_size=block_size, scale=scale, layout=layout, launch=sizes
    )
