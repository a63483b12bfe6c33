"""Dense MLA: absorbed latent attention over every row of a sequence."""

from __future__ import annotations

from sidestream.ops.dense_mla import decode, torch_impl
from sidestream.ops.operator import operator

__all__ = ["dense_mla", "dense_mla_decode"]

dense_mla = operator("dense_mla.dense_mla", reads=("q", "pool", "block_table"))(torch_impl.dense_mla)
dense_mla_decode = operator("dense_mla.dense_mla_decode", reads=("q", "pool", "block_table", "context_lens"))(
    decode.dense_mla_decode
)
