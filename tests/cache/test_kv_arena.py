"""The arena: no two layers share a row but the staging places, and those are the same in every view."""

from __future__ import annotations

import pytest
import torch

from sidestream.cache.groups import CacheGroup, CacheKind
from sidestream.cache.host_pool import HostPool
from sidestream.cache.kv_arena import KVArena

ROWS, ELEMS = 4, 6


def group(layers: tuple[int, ...]) -> CacheGroup:
    return CacheGroup(CacheKind.KV, layers, ROWS, ELEMS, torch.float32)


@pytest.mark.parametrize("hot_rows", [0, 7, 8])
def test_patterns_written_through_each_view_are_read_back_through_the_others(hot_rows: int) -> None:
    layers = (1, 4, 5)
    arena = KVArena(group(layers), places=5, hot_rows=hot_rows, staged=3, device="cpu")
    arena.memory.fill_(-1)
    for layer in layers:
        arena.own_rows(layer)[:] = layer
    arena.staging[:] = 100
    for layer in layers:
        own = arena.own_rows(layer)
        assert own.shape[0] >= 5 * ROWS + hot_rows
        assert (own == layer).all()
        view, first = arena.layer(layer), arena.first_staged(layer) * ROWS
        assert (view[first:] == 100).all()
        assert view[first:].data_ptr() == arena.staging.data_ptr()
        assert view[first:].shape == arena.staging.shape == (3 * ROWS, ELEMS)
        assert arena.hot_base + hot_rows <= own.shape[0]
    assert (arena.memory >= 0).all(), "a row belongs to nobody"
    assert arena.nbytes == arena.memory.numel() * 4


def test_a_host_pool_has_a_piece_a_layer_and_a_scratch_block() -> None:
    with HostPool(group((0, 2)), 3, device=torch.device("cpu")) as pool:
        for layer in (0, 2):
            assert pool.layer(layer).shape == (4 * ROWS, ELEMS)
            pool.layer(layer).fill_(layer)
        assert (pool.layer(0) == 0).all()
        assert pool.fileno() == -1
    pool.close()  # twice does no harm
