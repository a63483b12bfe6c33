"""The DSA indexer: index keys, their scores, and the token positions they select."""

from __future__ import annotations

from typing import Any

import torch

from sidestream.core.ring import RingPlan
from sidestream.core.segment import Segment
from sidestream.ops.indexer import decode, keys, torch_impl
from sidestream.ops.operator import operator

__all__ = [
    "Segment",
    "index_scores",
    "pool_keys",
    "select_topk",
    "select_topk_decode",
    "write_keys",
    "write_normed_keys",
    "write_pools",
]

write_keys = operator("indexer.write_keys", reads=("rows", "k"), writes=("keys_flat",), rows={"keys_flat": "rows"})(
    keys.write_keys
)
write_normed_keys = operator(
    "indexer.write_normed_keys",
    reads=("rows", "k", "norm_weight", "norm_bias", "cos", "sin"),
    writes=("keys_flat",),
    rows={"keys_flat": "rows"},
)(keys.write_normed_keys)
pool_keys = operator(
    "indexer.pool_keys",
    reads=("k", "gate", "ape", "tail", "plan", "pools"),
    writes=("tail",),
    rows={"tail": "plan"},
)(keys.pool_keys)
write_pools = operator(
    "indexer.write_pools",
    reads=("k", "gate", "ape", "norm_weight", "norm_bias", "tail", "plan", "entries"),
    writes=("tail", "keys_flat"),
    rows={"tail": "plan", "keys_flat": "entries"},
)(keys.write_pools)
index_scores = operator("indexer.index_scores", reads=("q", "weights", "keys"))(torch_impl.index_scores)
select_topk = operator(
    "indexer.select_topk",
    reads=("q", "weights", "keys", "block_table", "positions", "cos", "sin"),
    writes=("out",),
    rows={"keys": "block_table"},
)(torch_impl.select_topk)
select_topk_decode = operator(
    "indexer.select_topk_decode",
    reads=("q", "weights", "keys", "block_table", "context_lens", "cos", "sin"),
    writes=("out",),
    rows={"keys": "block_table"},
)(decode.select_topk_decode)


@write_keys.register("cuda")
def _write_keys(keys_flat: torch.Tensor, rows: torch.Tensor, k: torch.Tensor) -> None:
    if keys_flat.is_cuda:
        from sidestream.ops.indexer import triton_keys

        if keys_flat.dtype in triton_keys.FLOATS and k.dtype in triton_keys.FLOATS:
            return triton_keys.write_keys(keys_flat, rows, k)
    return keys.write_keys(keys_flat, rows, k)


@pool_keys.register("cuda")
def _pool_keys(
    k: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    *,
    tail: torch.Tensor,
    plan: RingPlan,
    pools: torch.Tensor,
) -> torch.Tensor:
    if k.is_cuda:
        from sidestream.ops.indexer import triton_keys, triton_pools

        if triton_keys.takes_pools(k, gate, tail, k, plan):
            return triton_pools.pool_keys(k, gate, ape, tail=tail, plan=plan, pools=pools)
    return keys.pool_keys(k, gate, ape, tail=tail, plan=plan, pools=pools)


@write_pools.register("cuda")
def _write_pools(
    k: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    *,
    tail: torch.Tensor,
    plan: RingPlan,
    keys_flat: torch.Tensor,
    **others: Any,
) -> None:
    if k.is_cuda:
        from sidestream.ops.indexer import triton_keys

        if triton_keys.takes_pools(k, gate, tail, keys_flat, plan):
            return triton_keys.write_pools(k, gate, ape, tail=tail, plan=plan, keys_flat=keys_flat, **others)
    return keys.write_pools(k, gate, ape, tail=tail, plan=plan, keys_flat=keys_flat, **others)


@write_normed_keys.register("cuda")
def _write_normed_keys(
    keys_flat: torch.Tensor,
    rows: torch.Tensor,
    k: torch.Tensor,
    *,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    **others: Any,
) -> None:
    named: dict[str, Any] = {"norm_weight": norm_weight, "norm_bias": norm_bias, "cos": cos, "sin": sin, **others}
    if k.is_cuda:
        from sidestream.ops.indexer import triton_keys

        angles = [angle for angle in (cos, sin) if angle is not None]
        if triton_keys.takes_normed(keys_flat, k, norm_weight, norm_bias, *angles):
            return triton_keys.write_normed_keys(keys_flat, rows, k, **named)
    return keys.write_normed_keys(keys_flat, rows, k, **named)


@select_topk_decode.register("cuda")
def _select_topk_decode(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    *,
    block_table: torch.Tensor,
    topk: int,
    kpool: int,
    **others: Any,
) -> None:
    if q.is_cuda:
        from sidestream.ops.indexer import triton_decode

        if triton_decode.takes(q, weights, keys, block_table, topk // kpool):
            others.pop("scratch_bytes", None)
            return triton_decode.select_topk_decode(
                q, weights, keys, block_table=block_table, topk=topk, kpool=kpool, **others
            )
    return decode.select_topk_decode(q, weights, keys, block_table=block_table, topk=topk, kpool=kpool, **others)


@select_topk.register("cuda")
def _select_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    *,
    block_table: torch.Tensor,
    topk: int,
    kpool: int,
    **others: Any,
) -> None:
    if q.is_cuda:
        from sidestream.ops.indexer import triton_prefill

        if triton_prefill.takes(q, weights, keys, block_table, topk // kpool):
            return triton_prefill.select_topk(
                q, weights, keys, block_table=block_table, topk=topk, kpool=kpool, **others
            )
    return torch_impl.select_topk(q, weights, keys, block_table=block_table, topk=topk, kpool=kpool, **others)
