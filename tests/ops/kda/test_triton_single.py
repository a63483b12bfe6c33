"""KDA's decode step in one launch, its own source run on a CPU: see ``gluon_in_torch``. A cluster is one program there,
whose parts' numbers are those of a tensor."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from sidestream.ops.kda.torch_impl import L2_EPS
from tests.ops.gluon_in_torch import layout
from tests.ops.kda import decode_step_case as case_module
from tests.ops.kda.decode_step_case import decode_step_case
from tests.ops.kda.gluon_in_torch import run
from tests.ops.kda.test_triton_advance import DIM, HEADS, KINDS, check
from tests.ops.operator_case import map_tensors

triton_single = pytest.importorskip("sidestream.ops.kda.triton_single")


def multiplied(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return a.float() @ b.float() + total


def exchanged(_what: Any, _operands: Any, given: list[Any]) -> Any:
    """What a program that sends a number has then: its parts' numbers."""
    return given[-1] if given else None


def arguments(mine: dict[str, Any], *choices: Any) -> tuple[Any, ...]:
    """As the kernel takes them."""
    weight, plan, state, rows = mine["conv_weight"], mine["plan"], mine["state"], mine["projected"].shape[0]
    out = torch.empty(rows, HEADS * DIM)
    memories = (mine["projected"], mine["conv_state"], state, out, mine["expand"], weight.t())
    memories += tuple(mine[name] for name in ("dt_bias", "A_log", "norm_weight", "slots", "start"))
    bound, stride = mine["lower_bound"], mine["projected"].stride(0)
    numbers = (bound or 0.0, mine["norm_eps"], stride, *weight.stride(), HEADS, L2_EPS)
    return (*memories, *numbers, state.shape[1], DIM, plan.window, plan.length, bound is not None, *choices)


CHOICES = [(1, True), (2, False)]
"""Parts, and whether the next kernel is released early."""


@pytest.mark.parametrize("choices", CHOICES)
@KINDS
def test_a_step_equals_the_formula(versions: int, rollback: int, bounded: bool, choices: tuple[Any, ...]) -> None:
    """Of what the kernel in front writes nothing is read ahead; each number of parts."""
    case = decode_step_case(6, HEADS, DIM, padding=2, versions=versions, rollback=rollback, bounded=bounded)
    mine = map_tensors(case, torch.clone)
    given = arguments(mine, *choices)
    helpers = (triton_single._past, triton_single._weights, triton_single._times)
    own = dict.fromkeys(("_blocked", "_product", "_shared"), layout) | {
        "_sigmoid": torch.sigmoid,
        "_log2": torch.log2,
        "mma_v2": multiplied,
        "_exchange": exchanged,
        "_taken": lambda _what, numbers: numbers.sum().broadcast_to(numbers.shape),
    }
    for program in product(range(HEADS), range(mine["projected"].shape[0])):
        run(triton_single.single, helpers, program, given, late=(0,), **own)
    check(case, mine, given[3])


@pytest.mark.parametrize("window", [2, 3])
def test_fewer_taps(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above."""
    monkeypatch.setattr(case_module, "WINDOW", window)
    test_a_step_equals_the_formula(1, 1, True, CHOICES[1])
