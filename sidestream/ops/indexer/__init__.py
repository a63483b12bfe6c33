"""The DSA indexer: index keys, their scores, and the token positions they select."""

from __future__ import annotations

from sidestream.core.segment import Segment
from sidestream.ops.indexer import decode, keys, torch_impl
from sidestream.ops.operator import operator

__all__ = ["Segment", "index_scores", "pool_keys", "select_topk", "select_topk_decode", "write_keys"]

write_keys = operator("indexer.write_keys", reads=("rows", "k"), writes=("keys_flat",), rows={"keys_flat": "rows"})(
    keys.write_keys
)
pool_keys = operator(
    "indexer.pool_keys",
    reads=("k", "gate", "ape", "tail", "plan", "pools"),
    writes=("tail",),
    rows={"tail": "plan"},
)(keys.pool_keys)
index_scores = operator("indexer.index_scores", reads=("q", "weights", "keys"))(torch_impl.index_scores)
select_topk = operator(
    "indexer.select_topk",
    reads=("q", "weights", "keys", "block_table", "positions"),
    writes=("out",),
    rows={"keys": "block_table"},
)(torch_impl.select_topk)
select_topk_decode = operator(
    "indexer.select_topk_decode",
    reads=("q", "weights", "keys", "block_table", "context_lens"),
    writes=("out",),
    rows={"keys": "block_table"},
)(decode.select_topk_decode)
