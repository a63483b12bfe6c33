"""Residency and row copies on a GPU: every test of the kernels against their references, run there."""

from __future__ import annotations

import pytest

from sidestream.ops.residency import triton_resolve
from tests.ops.residency.model import Steps

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows_each", [1, 2, 3])
def test_random_steps_equal_the_model(rows_each: int) -> None:
    Steps(triton_resolve.resolve, "cuda", rows_each=rows_each, seed=20 + rows_each).run(3400)
