"""KDA's kernel in Gluon, its own source run on a CPU: Gluon has no interpreter, see ``gluon_in_torch``."""

from __future__ import annotations

from itertools import pairwise
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


def arguments(
    mine: dict[str, Any], bounded: bool, late: bool = False, beyond: int = 0, in_turn: int = 1
) -> tuple[Any, ...]:
    """As the kernel takes them."""
    weight, plan, state, rows = mine["conv_weight"], mine["plan"], mine["state"], mine["projected"].shape[0]
    low = mine["projected"][:, 3 * HEADS * DIM : 3 * HEADS * DIM + 2 * DIM].view(rows, 2, DIM).transpose(0, 1)
    expanded = torch.bmm(low, mine["expand"].transpose(1, 2)).contiguous()
    out = torch.empty(rows, HEADS * DIM)
    memories = (mine["projected"], mine["conv_state"], state, out, expanded, weight.t())
    memories += tuple(mine[name] for name in ("dt_bias", "A_log", "norm_weight", "slots", "start"))
    numbers = (mine["lower_bound"] or 0.0, mine["norm_eps"], mine["projected"].stride(0), *weight.stride())
    sizes = (rows * HEADS * DIM, HEADS, L2_EPS, state.shape[1], DIM, plan.window, plan.length)
    return (*memories, *numbers, *sizes, bounded, True, True, late, beyond, False, in_turn)


def advanced(mine: dict[str, Any], given: tuple[Any, ...], late: tuple[int, ...] = (4,)) -> list[list[tuple[int, int]]]:
    """What each program asked for; all heads of a row, then those of the next."""
    grid = (HEADS // given[-1], mine["projected"].shape[0])
    programs, helpers = (
        ((h, t) for t in range(grid[1]) for h in range(grid[0])),
        (triton_advance._sigmoid, triton_advance._ask),
    )
    return [run(triton_advance.advance, helpers, program, grid, given, late=late) for program in programs]


@KINDS
@pytest.mark.parametrize(("late", "in_turn"), [(False, 1), (True, 1), (False, HEADS), (True, HEADS)])
def test_a_step_equals_the_formula(versions: int, rollback: int, bounded: bool, late: bool, in_turn: int) -> None:
    """Of what is still being written the kernel reads nothing ahead: if it is late, of the projection neither. A state
    is there when it is used, and read whole before the next one comes in its place."""
    case = case_of(6, versions, rollback, bounded)
    mine = map_tensors(case, torch.clone)
    given = arguments(mine, bounded, late, in_turn=in_turn)
    assert not any(advanced(mine, given, late=(0, 4) if late else (4,)))
    check(case, mine, given[3])


@KINDS
def test_a_program_asks_for_the_state_of_one_that_starts_later(
    versions: int, rollback: int, bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of it and nothing else: not of those that start at once, of fresh sequences, or beyond the last row."""
    monkeypatch.setattr(triton_advance, "RESIDENT", triton_advance.gl.constexpr(5))
    case = case_of(9, versions, rollback, bounded)
    mine = map_tensors(case, torch.clone)
    given = arguments(mine, bounded, beyond=2)
    asked = advanced(mine, given)
    check(case, mine, given[3])
    row, starts, slots = 4 * DIM * DIM, case["start"].tolist(), case["slots"].tolist()
    for t in range(9):
        for h in range(HEADS):
            spans, place = sorted(asked[t * HEADS + h]), 0
            if t + 2 < 9 and (t + 2) * HEADS + h >= 5 and starts[t + 2]:
                place = (slots[t + 2] * versions + starts[t + 2] % versions) * HEADS + h
                assert (spans[0][0], spans[-1][1]) == (place * row, (place + 1) * row)
                assert all(before[1] == after[0] for before, after in pairwise(spans))
            else:
                assert spans == []
    assert sum(map(bool, asked)) == 1 + 4 * HEADS
