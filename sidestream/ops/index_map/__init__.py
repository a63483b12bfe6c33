"""Index map: logical token positions to physical rows."""

from __future__ import annotations

from sidestream.ops.index_map import torch_impl
from sidestream.ops.operator import operator

__all__ = ["logical_to_physical"]

logical_to_physical = operator(
    "index_map.logical_to_physical",
    reads=("logical", "block_table", "token_rows"),
    writes=("out", "counts"),
    rows={"block_table": "token_rows"},
)(torch_impl.logical_to_physical)
