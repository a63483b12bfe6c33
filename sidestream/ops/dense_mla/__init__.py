"""Dense MLA: absorbed latent attention over every row of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sidestream.core.segment import Segment
from sidestream.ops.dense_mla import decode, torch_impl
from sidestream.ops.kv_rows.layout import KVRowLayout
from sidestream.ops.operator import operator

__all__ = ["dense_mla", "dense_mla_decode"]

dense_mla = operator("dense_mla.dense_mla", reads=("q", "pool", "block_table"))(torch_impl.dense_mla)
dense_mla_decode = operator("dense_mla.dense_mla_decode", reads=("q", "pool", "block_table", "context_lens"))(
    decode.dense_mla_decode
)


@dense_mla.register("cuda")
def _mixed_on_cuda(
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
    from sidestream.ops.dense_mla import triton_mixed  # not before a tensor needs it: engines on a CPU have no Triton

    return triton_mixed.dense_mla(
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


@dense_mla_decode.register("cuda")
def _decode_on_cuda(
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
    from sidestream.ops.dense_mla import triton_decode  # not before a tensor needs it: engines on a CPU have no Triton

    return triton_decode.dense_mla_decode(
        q,
        pool,
        block_table=block_table,
        context_lens=context_lens,
        block_size=block_size,
        scale=scale,
        layout=layout,
        scratch_bytes=scratch_bytes,
    )
