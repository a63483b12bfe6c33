"""Every operator of a uniform decode in a capture: the same bits eagerly on a CPU, eagerly on the simulated device, and
captured there and replayed with other inputs in the same memory, which is poisoned before each replay."""

from __future__ import annotations

import pytest
import torch

from sidestream.ops.operator import OPERATORS
from sidestream.streams.simulated import Order
from tests.ops.operator_case import Arguments, Case, Results, call, map_tensors, overwrite, results_of, same, spoil
from tests.ops.operator_cases import CASES
from tests.streams.programs import Machine

SEEDS = (0, 1)
pytestmark = pytest.mark.usefixtures("torch_alone")


def on_cpu(case: Case, arguments: Arguments) -> Results:
    """What the device's implementation returns and leaves in written arguments, on a CPU."""
    operator = OPERATORS[case.operator]
    function = operator.implementations.get("sim", operator.implementations["cpu"])
    own = map_tensors(arguments, torch.clone)
    returned = call(function, own)
    return results_of(case, own, returned)


def check(got: Results, want: Results, when: str) -> None:
    assert [name for name, _ in got] == [name for name, _ in want]
    for (name, a), (_, b) in zip(got, want, strict=True):
        assert same(a.cpu(), b), f"{name} differs {when}"


@pytest.mark.parametrize("case", [case for case in CASES if case.captured], ids=lambda case: case.name)
def test_captured_equals_eager(case: Case) -> None:
    variants = [case.make(seed) for seed in SEEDS]
    want = [on_cpu(case, arguments) for arguments in variants]
    changed = [not same(a, b) for (_, a), (_, b) in zip(*want, strict=True)]
    assert any(changed), "both inputs give the same: a replay of the first could pass for the second"
    operator = OPERATORS[case.operator]
    m = Machine(Order.RANDOM, seed=len(case.name))
    with m.on_compute():
        for arguments, results in zip(variants, want, strict=True):
            own = map_tensors(arguments, lambda tensor: tensor.to("sim"))
            check(results_of(case, own, call(operator, own)), results, "eagerly")
        buffers = map_tensors(variants[0], lambda tensor: tensor.to("sim"))
        with m.streams.capture(case.operator) as graph:
            returned = call(operator, buffers)
        for which in (0, 1, 0):
            overwrite(buffers, variants[which])
            spoil(returned)
            graph.replay()
            check(results_of(case, buffers, returned), want[which], f"in a replay of variant {which}")
    m.backend.check()


def test_every_operator_is_tried() -> None:
    """Only operators that take host integers, and are never captured, may be left out."""
    captured = {case.operator for case in CASES if case.captured}
    assert set(OPERATORS) - captured == {
        "dense_mla.dense_mla",
        "indexer.select_topk",
        "kda.chunked",
        "kda.mixed_step",
        "slot_copy.copy_slots",
    }
