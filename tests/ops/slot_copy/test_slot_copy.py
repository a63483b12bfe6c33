"""Slot copies in torch and Triton (interpreted without a GPU) against the truth, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestream.ops.slot_copy import copy_slots, reference, triton_copy
from tests.ops.triton_mode import DEVICE

BOTH = pytest.mark.parametrize("function", [copy_slots, triton_copy.copy_slots], ids=["dispatched", "triton"])
KINDS: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {
    "one kind": [((3, 6, 2, 5), torch.float32)],
    "words of four bytes": [((2, 6, 3, 8), torch.bfloat16), ((3, 6, 3, 70, 30), torch.float32)],
    "words of two": [((1, 6, 3, 5), torch.bfloat16), ((4, 6, 2, 2), torch.float32), ((2, 6, 7), torch.bfloat16)],
    "bytes": [((2, 6, 5), torch.uint8), ((1, 6, 9000), torch.uint8)],
}
"""[layers, slots, ...] of each."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


@BOTH
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_slots_are_copied_in_order_across_layers_and_kinds(function: Any, kinds: list[Any]) -> None:
    """Over transposed views; the bits of NaN survive, and nothing else changes."""
    memory = [
        torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype)[..., 0] for shape, dtype in kinds
    ]
    memory = [state.contiguous() for state in memory]
    wanted, mine = [state.clone() for state in memory], [state.clone().to(DEVICE) for state in memory]
    taken, to = (4, 1, 5, 3), (1, 2, 4, 3)
    reference.copy_slots(*(state.transpose(0, 1) for state in wanted), to=to, taken=taken)
    function(*(state.transpose(0, 1) for state in mine), to=to, taken=taken)
    for got, want, before in zip(mine, wanted, memory, strict=True):
        assert torch.equal(bits(got), bits(want))
        assert torch.equal(bits(want[:, 2]), bits(before[:, 4])), "by way of slot 1"


@BOTH
def test_without_any_slot_nothing_changes(function: Any) -> None:
    state = torch.randn(2, 4, 3, device=DEVICE)
    before = state.clone()
    function(state.transpose(0, 1), to=(), taken=())
    assert torch.equal(state, before)


def test_memory_that_the_kernel_does_not_know_is_left_to_torch() -> None:
    whole = torch.randn(2, 5, 8)
    assert triton_copy.takes([whole.transpose(0, 1)])
    for other in (whole, whole[:, :, :4].transpose(0, 1), whole[:, :4].transpose(0, 1), torch.randn(5, 8)):
        assert not triton_copy.takes([other])
    assert not triton_copy.takes([whole.transpose(0, 1)] * 4)
