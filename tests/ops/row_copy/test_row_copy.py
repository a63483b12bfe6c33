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
]


@pytest.mark.parametrize("elems", ELEMS)
def test_torch_brings_rows_whole_and_changes_nothing_else(elems: int) -> None:
    """On a CPU alone: torch does not index memory of the host by rows that a GPU holds."""
    check_rows(torch_impl.copy_rows, elems, device="cpu")


@pytest.mark.parametrize("elems", ELEMS)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_triton_brings_rows_whole_and_changes_nothing_else(plan: CopyPlan, elems: int) -> None:
    check_rows(partial(triton_copy.copy_rows, plan=plan), elems, device=DEVICE)
