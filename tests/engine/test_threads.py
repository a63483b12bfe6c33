"""Small steps run on one thread, whatever happens in them; large ones on torch's own number."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sidestream.engine.threads import SMALL_STEP, step_threads


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("work", "threads"), [(1, 1), (SMALL_STEP, 1), (SMALL_STEP + 1, 2)])
def test_threads_of_a_step(work: int, threads: int) -> None:
    with step_threads(work):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 2


def test_a_failed_step_gives_the_threads_back() -> None:
    with pytest.raises(KeyboardInterrupt), step_threads(1):
        raise KeyboardInterrupt
    assert torch.get_num_threads() == 2
