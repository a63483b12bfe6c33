"""Operator tests draw from torch's global generator: seeded by the test's own name, so that order does not matter."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
import torch

from sidestream.ops.index_map import torch_impl as index_map
from sidestream.ops.indexer import torch_impl as indexer
from sidestream.ops.topk import torch_impl as topk


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="module", params=["numpy", "torch"])
def either_library(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small inputs take numpy on a CPU, larger ones and other devices torch: run a module's tests through both."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(topk, "NUMPY_ENTRIES", -1)
            patch.setattr(index_map, "NUMPY_ENTRIES", -1)
            patch.setattr(indexer, "NUMPY_TOKENS", -1)
        yield
