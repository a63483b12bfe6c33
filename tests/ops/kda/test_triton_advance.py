"""KDA's kernel in Gluon, its own source run on a CPU: Gluon has no interpreter, see ``gluon_in_torch``."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from sidestream.ops.kda import reference
from sidestream.ops.kda.torch_impl import L2_EPS
from tests.ops.kda.decode_step_case import decode_step_case, owned
from tests.ops.kda.gluon_in_torch import run
from tests.ops.operator_case import map_tensors
from tests.tolerances import FP32_GEMM

triton_advance = pytest.importorskip("sidestream.ops.kda.triton_advance")

HEADS, DIM = 2, 128
KINDS = pytest.mark.parametrize(("versions", "rollback", "bounded"), [(1, 0, True), (3, 2, False)])


def case_of(rows: int, versions: int, rollback: int, bounded: bool) -> dict[str, Any]:
    """Fresh, continuing and padding rows; what is nobody's is NaN."""
    return decode_step_case(rows, HEADS, DIM, padding=2, versions=versions, rollback=rollback, bounded=bounded)


def check(case: dict[str, Any], mine: dict[str, Any], out: torch.Tensor) -> None:
    want, length = reference.decode_step(**case), case["plan"].length
    torch.testing.assert_close(out, want, rtol=FP32_GEMM, atol=FP32_GEMM)
    torch.testing.assert_close(owned(mine["state"]), owned(case["state"]), rtol=0, atol=FP32_GEMM)
    assert torch.equal(owned(mine["conv_state"], length=length), owned(case["conv_state"], length=length))


def arguments(mine: dict[str, Any], bounded: bool) -> tuple[Any, ...]:
    """As the kernel takes them."""
    weight, plan, state, rows = mine["conv_weight"], mine["plan"], mine["state"], mine["projected"].shape[0]
    low = mine["projected"][:, 3 * HEADS * DIM : 3 * HEADS * DIM + 2 * DIM].view(rows, 2, DIM).transpose(0, 1)
    expanded = torch.bmm(low, mine["expand"].transpose(1, 2)).contiguous()
    out = torch.empty(rows, HEADS * DIM)
    memories = (mine["projected"], mine["conv_state"], state, out, expanded, weight.t())
    memories += tuple(mine[name] for name in ("dt_bias", "A_log", "norm_weight", "slots", "start"))
    numbers = (mine["lower_bound"] or 0.0, mine["norm_eps"], mine["projected"].stride(0), *weight.stride())
    sizes = (rows * HEADS * DIM, HEADS, L2_EPS, state.shape[1], DIM, plan.window, plan.length)
    return (*memories, *numbers, *sizes, bounded, True, True)


@KINDS
def test_a_step_equals_the_formula(versions: int, rollback: int, bounded: bool) -> None:
    """Of what is still being written the kernel reads nothing ahead. A state is there when it is used."""
    case = case_of(6, versions, rollback, bounded)
    mine = map_tensors(case, torch.clone)
    given = arguments(mine, bounded)
    for program in product(range(HEADS), range(mine["projected"].shape[0])):
        run(triton_advance.advance, (triton_advance._sigmoid,), program, given, late=(4,))
    check(case, mine, given[3])
