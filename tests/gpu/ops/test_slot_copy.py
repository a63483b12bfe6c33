"""Slot copies on a GPU at real shapes: every byte of every layer and kind, and nothing else, in pools of any size."""

from __future__ import annotations

import pytest
import torch

from sidestream.ops.slot_copy import copy_slots, triton_copy

pytestmark = pytest.mark.gpu

KINDS = (((2, 3, 256), torch.bfloat16), ((6, 3, 24576), torch.bfloat16), ((6, 1, 64, 128, 128), torch.float32))
"""(layers, what a slot of a layer holds): those of eight layers of GLM-5.3-Flash."""


def test_slots_of_real_shapes() -> None:
    memory = [torch.randn(layers, 9, *slot, device="cuda").to(dtype) for (layers, *slot), dtype in KINDS]
    wanted = [state.clone() for state in memory]
    for state in wanted:
        state[:, 7] = state[:, 2]
        state[:, 1] = state[:, 7]
        state[:, 0] = state[:, 8]
    slots = [state.transpose(0, 1) for state in memory]
    assert triton_copy.takes(slots)
    copy_slots(*slots, to=(7, 1, 0), taken=(2, 7, 8))
    for got, want in zip(memory, wanted, strict=True):
        assert torch.equal(got, want)


def test_a_pool_beyond_two_to_the_31() -> None:
    """Of words: layers, and slots of the last one, lie behind it."""
    memory = torch.empty(3, 700, 1 << 20, dtype=torch.float32, device="cuda")
    assert memory.numel() > 2**31
    memory[:, 699] = torch.randn(3, 1 << 20, device="cuda")
    memory[:, 3] = memory[:, 698] = 7.0
    wanted = memory[:, 699].clone()
    copy_slots(memory.transpose(0, 1), to=(3,), taken=(699,))
    assert torch.equal(memory[:, 3], wanted)
    assert torch.equal(memory[:, 699], wanted)
    assert bool((memory[:, 698] == 7.0).all())
