"""Operator tests draw from torch's global generator: seeded by the test's own name, so that order does not matter."""

from __future__ import annotations

import zlib

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
