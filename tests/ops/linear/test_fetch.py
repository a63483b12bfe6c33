"""Weights asked for ahead: who asks, for how much, and that nothing changes."""

from __future__ import annotations

import pytest
import torch

from sidestream.ops.linear import fetch, fetch_ahead, triton_fetch, triton_linear
from sidestream.ops.linear.launches import Launch
from tests.ops.triton_mode import DEVICE


class Launches(list[int]):
    """In the place of the kernel: notes the pieces of each launch."""

    def __getitem__(self, grid: tuple[int]) -> object:  # type: ignore[override]
        def launch(memory: torch.Tensor, pieces: int, **_: object) -> None:
            assert memory.dtype is torch.uint8
            assert memory.numel() >= pieces * triton_fetch.PIECE
            assert (grid[0] - 1) * triton_fetch.THREADS < pieces <= grid[0] * triton_fetch.THREADS
            self.append(pieces)

        return launch


@pytest.mark.parametrize(("size", "pieces"), [(0, []), (4095, []), (4096, [1]), (132_000, [32]), (1 << 20, [256])])
def test_whole_pieces_of_the_beginning_are_asked_for(
    size: int, pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches()
    monkeypatch.setattr(triton_fetch, "_fetch", launches)
    triton_fetch.fetch(torch.empty(1 << 19, dtype=torch.bfloat16), size)
    assert launches == pieces


@pytest.mark.parametrize("size", [4096, 1 << 20])
def test_nothing_changes(size: int) -> None:
    weight = torch.randn(1024, 512).bfloat16().to(DEVICE)
    before = weight.clone()
    triton_fetch.fetch(weight, size)
    assert torch.equal(weight, before)


def test_a_cpu_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(weight: torch.Tensor, size: int) -> None:
        raise AssertionError(f"{size} bytes on {weight.device}")

    monkeypatch.setattr(fetch, "fetched_bytes", lambda rows: 1 << 20)
    monkeypatch.setattr(triton_fetch, "fetch", refuse)
    fetch_ahead(torch.empty(4096, 512), 8)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_product_that_asks_ahead_is_the_same(rows: int) -> None:
    """Also where it asks for more than a row has."""
    x, weight = torch.randn(rows, 256).bfloat16().to(DEVICE), torch.randn(70, 256).bfloat16().to(DEVICE)
    for splits in (1, 2):
        launch = Launch(1 if rows == 1 else 16, 16, 64, 4, 1, splits=splits)
        asking = Launch(1 if rows == 1 else 16, 16, 64, 4, 1, splits=splits, ahead=4096)
        want = triton_linear.linear(x, weight, None, launch=launch)
        assert torch.equal(triton_linear.linear(x, weight, None, launch=asking), want)
