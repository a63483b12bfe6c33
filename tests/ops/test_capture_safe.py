"""Every operator of a uniform decode in a capture: the same bits eagerly on a CPU, eagerly on the simulated device, and
captured there and replayed with other inputs in the same memory, which is poisoned before each replay."""

from __future__ import annotations

import pytest
import torch

from sidestream.ops.operator import OPERATORS
from sidestream.streams.simulated import Order
from tests.ops.operator_case import Arguments, Case, call, map_tensors, same, tensors_of
from tests.ops.operator_cases import CASES
from tests.streams.programs import Machine

SEEDS = (0, 1)


pytestmark = pytest.mark.usefixtures("torch_alone")
Results = list[tuple[str, torch.Tensor]]


def on_cpu(case: Case, arguments: Arguments) -> Results:
    """What the device's implementation returns and leaves in written arguments, on a CPU."""
    operator = OPERATORS[case.operator]
    function = operator.implementations.get("sim", operator.implementations["cpu"])
    own = map_tensors(arguments, torch.clone)
    returned = call(function, own)
    return named(case, own, returned)


def named(case: Case, arguments: Arguments, returned: tuple[torch.Tensor, ...]) -> Results:
    written = case.tensor_names()[1]
    results = [(f"result {i}", tensor) for i, tensor in enumerate(returned)]
    return results + [(name, tensor) for name, tensor in tensors_of(arguments) if name in written]


def check(got: Results, want: Results, when: str) -> None:
    assert [name for name, _ in got] == [name for name, _ in want]
    for (name, a), (_, b) in zip(got, want, strict=True):
        assert same(a.cpu(), b), f"{name} differs {when}"


def spoil(tensors: tuple[torch.Tensor, ...]) -> None:
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 0x7F)


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
            check(named(case, own, call(operator, own)), results, "eagerly")
        buffers = map_tensors(variants[0], lambda tensor: tensor.to("sim"))
        with m.streams.capture(case.operator) as graph:
            returned = call(operator, buffers)
        for which in (0, 1, 0):
            for (_, buffer), (_, value) in zip(tensors_of(buffers), tensors_of(variants[which]), strict=True):
                buffer.copy_(value)
            spoil(returned)
            graph.replay()
            check(named(case, buffers, returned), want[which], f"in a replay of variant {which}")
    m.backend.check()


def test_every_operator_is_tried() -> None:
    """Only operators that take host integers, and are never captured, may be left out."""
    captured = {case.operator for case in CASES if case.captured}
    assert set(OPERATORS) - captured == {"dense_mla.dense_mla", "indexer.select_topk", "kda.chunked"}
