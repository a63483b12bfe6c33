import torch

from sidestream.ops.slot_copy import copy_slots, reference


def test_slots_are_copied_in_order_across_layers() -> None:
    """Over a transposed view of [layers, slots, ...]; the bits of NaN survive, and nothing else changes."""
    memory = torch.randn(3, 6, 2, 5)
    memory[:, 4, 0] = torch.nan
    expected = memory.clone()
    pairs = ((4, 1), (1, 2), (5, 4), (3, 3))
    copy_slots(memory.transpose(0, 1), slots=pairs)
    reference.copy_slots(expected.transpose(0, 1), slots=pairs)
    assert torch.equal(memory.view(torch.int32), expected.view(torch.int32))
    assert memory[:, 2, 0].isnan().all()


def test_no_pair_changes_nothing() -> None:
    state = torch.arange(12.0).view(4, 3)
    copy_slots(state, slots=())
    assert torch.equal(state, torch.arange(12.0).view(4, 3))
