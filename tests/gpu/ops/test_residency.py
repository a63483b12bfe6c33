"""Residency and row copies on a GPU, whose kernels are launched early there, against their references."""

from __future__ import annotations

from functools import partial

import pytest

from sidestream.ops.residency import triton_resolve
from sidestream.ops.residency.triton_resolve import ResolvePlan
from sidestream.ops.row_copy import triton_copy
from sidestream.ops.row_copy.triton_copy import CopyPlan
from tests.ops.residency.model import Steps
from tests.ops.row_copy.rows import ELEMS, check_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("plan", [triton_resolve.DEFAULT_PLAN, ResolvePlan()], ids=str)
@pytest.mark.parametrize("rows_each", [1, 2, 3])
def test_random_steps_equal_the_model(rows_each: int, plan: ResolvePlan) -> None:
    resolve = partial(triton_resolve.resolve, plan=plan)
    Steps(resolve, "cuda", rows_each=rows_each, seed=20 + rows_each).run(3400)


@pytest.mark.parametrize("elems", ELEMS)
@pytest.mark.parametrize("plan", [triton_copy.DEFAULT_PLAN, CopyPlan()], ids=str)
def test_rows_arrive_whole_and_nothing_else_changes(plan: CopyPlan, elems: int) -> None:
    check_rows(partial(triton_copy.copy_rows, plan=plan), elems, device="cuda")
