"""A host pool that the machine has no room for is refused before any of it is taken."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sidestream.cache import host_pool
from sidestream.cache.groups import CacheGroup, CacheKind
from sidestream.cache.host_pool import SPARE_BYTES, HostPool
from sidestream.errors import CapacityError

LAYERS, ROWS, ELEMS = (0, 2, 5), 64, 16
GROUP = CacheGroup(CacheKind.KV, LAYERS, ROWS, ELEMS, torch.float32)
PIECE = 8 * ROWS * ELEMS * 4
"""Bytes of one layer: seven blocks and scratch, which are whole pages."""


def test_all_layers_scratch_and_what_others_need_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    left = len(LAYERS) * PIECE + SPARE_BYTES
    monkeypatch.setattr(host_pool.psutil, "virtual_memory", lambda: SimpleNamespace(available=left))
    with HostPool(GROUP, 7, device=torch.device("cpu")) as pool:
        assert pool.nbytes == len(LAYERS) * PIECE
    left -= 1
    with pytest.raises(CapacityError, match=rf"{3 * PIECE} bytes .*{left} bytes.*lower hisparse_host_memory"):
        HostPool(GROUP, 7, device=torch.device("cpu"))
