"""Blocks, hot rows and staging places of a layer lie apart, from each other and from every other layer's."""

from __future__ import annotations

import pytest
import torch

from sidestream.cache.groups import CacheGroup, CacheKind
from sidestream.cache.kv_arena import KVArena

LAYERS, PLACES, STAGED, ROWS, ELEMS = (1, 4, 5), 5, 3, 4, 6


@pytest.mark.parametrize("hot_rows", [1, 7, 8])
def test_each_part_written_by_its_number_is_read_back_behind_all_others(hot_rows: int) -> None:
    group = CacheGroup(CacheKind.KV, LAYERS, ROWS, ELEMS, torch.float32)
    arena = KVArena(group, places=PLACES, hot_rows=hot_rows, staged=STAGED, device="cpu")
    parts = {
        (layer, name): arena.layer(layer)[first : first + count]
        for layer in LAYERS
        for name, first, count in (
            ("blocks", 0, PLACES * ROWS),
            ("hot", arena.hot_base, hot_rows),
            ("staged", arena.first_staged(layer) * ROWS, STAGED * ROWS),
        )
    }
    numbers = {key: 0 if key[1] == "staged" else 1 + i for i, key in enumerate(parts)}  # staging is shared
    for key, rows in parts.items():
        rows.fill_(numbers[key])
    for key, rows in parts.items():
        assert (rows == numbers[key]).all(), key
        assert len(rows) == {"blocks": PLACES * ROWS, "hot": hot_rows, "staged": STAGED * ROWS}[key[1]], key
