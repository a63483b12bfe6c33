"""Operator tests draw from torch's global generator: seeded by the test's own name, so that order does not matter."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
import torch

from sidestream.ops.hyper_connection import torch_impl as hyper_connection
from sidestream.ops.index_map import torch_impl as index_map
from sidestream.ops.indexer import torch_impl as indexer
from sidestream.ops.kda import torch_impl as kda
from sidestream.ops.moe import torch_impl as moe
from sidestream.ops.topk import torch_impl as topk


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


def without_numpy() -> pytest.MonkeyPatch:
    """Send small inputs on a CPU through torch, as on other devices, until the patch is undone."""
    patch = pytest.MonkeyPatch()
    patch.setattr(topk, "NUMPY_ENTRIES", -1)
    patch.setattr(index_map, "NUMPY_ENTRIES", -1)
    patch.setattr(indexer, "NUMPY_TOKENS", -1)
    patch.setattr(hyper_connection, "NUMPY_MAX_TOKENS", -1)
    patch.setattr(kda, "NUMPY_TOKENS", -1)
    patch.setattr(moe, "FEW_ROWS", 0)
    return patch


@pytest.fixture(scope="module", params=["numpy", "torch"])
def either_library(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small inputs take numpy on a CPU, larger ones and other devices torch: run a module's tests through both."""
    patch = without_numpy() if request.param == "torch" else None
    yield
    if patch is not None:
        patch.undo()


@pytest.fixture
def torch_alone() -> Iterator[None]:
    """What devices run, for comparisons with them."""
    patch = without_numpy()
    yield
    patch.undo()
