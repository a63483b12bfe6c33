"""How many threads a step's torch operators use on a CPU.

A small step gains nothing from a second thread, and each of its hundreds of operators would meet at a barrier: beside
any other busy process the threads wait for the scheduler there, and the step takes ten to a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_STEP = 2**26
"""Tokens times bytes of weights up to which a step runs on one thread. Measured with the bundled model (21 MB) on two
idle cores: one thread is 8 % faster at 1 token, 10 % slower at 8, and 50 % slower at a chunk of 1,024."""


@contextmanager
def step_threads(work: int) -> Iterator[None]:
    """Run a step of ``work`` (tokens times bytes of weights) on one thread if it is small, else on torch's number."""
    threads = torch.get_num_threads()
    if work > SMALL_STEP or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
