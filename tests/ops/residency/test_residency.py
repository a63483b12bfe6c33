"""Residency against the plain-Python model: torch on the CPU, Triton in the interpreter or on the GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sidestream.ops.residency import new_state, torch_impl, triton_resolve
from sidestream.ops.residency.reference import HotSlots
from sidestream.ops.residency.triton_resolve import ResolvePlan
from tests.ops.residency.model import Steps
from tests.ops.triton_mode import DEVICE, INTERPRETED


@pytest.mark.parametrize(("rows_each", "num_steps"), [(1, 6000), (2, 2500), (3, 1500)])
def test_torch_equals_the_model_over_random_steps(rows_each: int, num_steps: int) -> None:
    Steps(torch_impl.resolve, "cpu", rows_each=rows_each, seed=rows_each).run(num_steps)


@pytest.mark.parametrize("num_steps", [150] if INTERPRETED else [150, 3500], ids="{}steps".format)
@pytest.mark.parametrize(
    ("once", "rows_each", "num_slots"), [(False, 1, 13), (False, 3, 13), (True, 1, 13), (True, 2, 16), (True, 3, 13)]
)
def test_triton_equals_the_model_over_random_steps(once: bool, rows_each: int, num_slots: int, num_steps: int) -> None:
    resolve = partial(triton_resolve.resolve, plan=ResolvePlan(once=once))
    Steps(resolve, DEVICE, rows_each=rows_each, seed=10 + rows_each, num_slots=num_slots).run(num_steps)


def test_the_least_recently_used_slot_goes_first() -> None:
    model = HotSlots(3)
    host = [-1, -2, -3, -4]
    assert model.select([[0, 1, 2]], host, 1).misses == [(0, 0), (1, 1), (2, 2)]
    assert model.select([[0]], host, 1).misses == []
    assert model.select([[3]], host, 1).misses == [(3, 1)]
    assert model.order == [2, 0, 1]


def test_a_step_without_host_blocks_changes_nothing() -> None:
    """Nothing is looked up, nothing moves: free where there is no pressure."""
    for resolve, device in ((torch_impl.resolve, "cpu"), (triton_resolve.resolve, DEVICE)):
        slot_of, slots = new_state(2, 4, 16, device=device)
        before = slots.clone()
        out = torch.zeros(1, 3, dtype=torch.int64, device=device)
        counts, misses = (torch.full((1,), 9, dtype=torch.int32, device=device) for _ in range(2))
        lists = torch.full((2, 1, 4), 77, dtype=torch.int64, device=device)
        resolve(
            torch.tensor([[1, 5, -1]], dtype=torch.int32, device=device),
            torch.tensor([[7, 3, 0, 0]], device=device),
            slot_of, slots,
            seats=torch.tensor([1], device=device), positions=torch.tensor([6], device=device),
            table_rows=torch.tensor([0], device=device), block_size=4, hot_base=100,
            out=out, counts=counts, host_rows=lists[0], hot_rows=lists[1], misses=misses,
            totals=torch.zeros(2, 2, dtype=torch.int64, device=device),
        )  # fmt: skip
        assert out.tolist() == [[29, 13, -1]]
        assert counts.tolist() == [2]
        assert misses.tolist() == [0]
        assert torch.equal(slots, before)
        assert (slot_of == -1).all()
        assert (lists == 77).all()
