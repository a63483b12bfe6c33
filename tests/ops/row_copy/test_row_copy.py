"""Row copies of both implementations against the reference: counts, strides, row types, nothing beside them."""

from __future__ import annotations

from functools import partial

import pytest

from sidestream.ops.row_copy import torch_impl, triton_copy
from sidestream.ops.row_copy.triton_copy import CopyPlan
from tests.ops.row_copy.rows import ELEMS, check_rows
from tests.ops.triton_mode import DEVICE

PLANS = [
    triton_copy.DEFAULT_PLAN,
    CopyPlan(),
    CopyPlan(rows=2, programs=2),
    CopyPlan(rows=4, warps=2, programs=1),
    CopyPlan(vectors=True),
    CopyPlan(rows=2, programs=2, early=True, vectors=True),
    CopyPlan(rows=4, warps=2, programs=1, early=True),
    CopyPlan(total=9),
    CopyPlan(total=1, early=True),
    CopyPlan(programs=1, turns=2),
    CopyPlan(rows=2, programs=1, turns=3, early=True),
]


@pytest.mark.parametrize("elems", ELEMS)
def test_torch_brings_rows_whole_and_changes_nothing_else(elems: int) -> None:
    """On a CPU alone: torch does not index memory of the host by rows that a GPU holds."""
    check_rows(torch_impl.copy_rows, elems, device="cpu")


@pytest.mark.parametrize("elems", ELEMS)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_triton_brings_rows_whole_and_changes_nothing_else(plan: CopyPlan, elems: int) -> None:
    check_rows(partial(triton_copy.copy_rows, plan=plan), elems, device=DEVICE)


@pytest.mark.parametrize(
    ("requests", "places", "programs"),
    [
        (1, 512, 512),
        (1, 2048, 1024),
        (1, 4096, 1024),
        (1, 8192, 1024),
        (1, 16384, 2048),
        (1, 65536, 2048),
        (2, 16384, 1024),
        (32, 4096, 64),
        (4096, 4096, 1),
    ],
)
def test_long_lists_and_many_requests_share_the_programs(requests: int, places: int, programs: int) -> None:
    assert triton_copy.DEFAULT_PLAN.programs_of(requests, places) == programs


def test_a_program_of_several_rows_takes_no_more_turns_than_asked() -> None:
    assert CopyPlan(rows=2, programs=1, turns=3).programs_of(1, 7) == 2
    assert CopyPlan(rows=2, programs=1, turns=4).programs_of(1, 7) == 1
