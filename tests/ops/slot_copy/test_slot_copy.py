import torch

from sidestream.ops.slot_copy import copy_slots, reference


def test_slots_are_copied_in_order_across_layers() -> None:
    """Over a transposed view of [layers, slots, ...]; the bits of NaN survive, and nothing else changes."""
    memory = torch.randn(3, 6, 2, 5)
    memory[:, 4, 0] = torch.nan
    expected = memory.clone()
    taken, to = (4, 1, 5, 3), (1, 2, 4, 3)
    slots, wanted = memory.transpose(0, 1), expected.transpose(0, 1)
    copy_slots(slots, slots, to=to, taken=taken)
    reference.copy_slots(wanted, wanted, to=to, taken=taken)
    assert torch.equal(memory.view(torch.int32), expected.view(torch.int32))
    assert memory[:, 2, 0].isnan().all()


def test_between_two_pools_and_without_any_slot() -> None:
    target, source = torch.zeros(4, 3), torch.arange(12.0).view(4, 3)
    copy_slots(target, source, to=(), taken=())
    assert not target.any()
    expected = target.clone()
    copy_slots(target, source, to=(1, 3), taken=(3, 3))
    reference.copy_slots(expected, source, to=(1, 3), taken=(3, 3))
    assert torch.equal(target, expected)
    assert torch.equal(target[1], source[3])
