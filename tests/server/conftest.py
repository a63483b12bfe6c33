"""One server for all tests that leave it as they found it; the same answers from ``LLM`` to compare with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sidestream import LLM
from tests.server.live_server import LiveServer, live_server


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    with live_server("--max-num-seqs", "16", "--max-body-bytes", "1000000", "--max-sequences", "64") as running:
        yield running.await_ready()


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(device="cpu", max_num_seqs=16)
