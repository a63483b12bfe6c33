"""What operators declare to read and write against what they do. A wrong declaration would blind the hazard checker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestream.ops.operator import OPERATORS
from tests.ops.operator_case import Arguments, Case, call, map_tensors, rows_named, same, tensors_of
from tests.ops.operator_cases import CASES

pytestmark = pytest.mark.usefixtures("either_library")
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def functions(case: Case) -> list[Any]:
    """Every implementation that runs on a CPU."""
    operator = OPERATORS[case.operator]
    return list(dict.fromkeys(operator.implementations.values()))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def mask_of(case: Case, arguments: Arguments, name: str, *, written: bool) -> torch.Tensor | None:
    """Over the first dimension of an argument: rows that may be touched. None if all may be."""
    rows = rows_named(case, arguments, name, written=written)
    if rows is None:
        return None
    mask = torch.zeros(arguments[name].shape[0], dtype=torch.bool)
    mask[rows] = True
    return mask


@every_case
def test_every_tensor_is_declared_and_every_declaration_is_a_tensor(case: Case) -> None:
    reads, writes = case.tensor_names()
    arguments = case.make(0)
    assert {name for name, _ in tensors_of(arguments)} <= reads | writes
    assert reads | writes <= set(arguments)
    for target, index in OPERATORS[case.operator].rows.items():
        assert target in reads | writes
        assert ({index} if isinstance(index, str) else set(index)) <= set(arguments)


@every_case
def test_only_what_is_declared_is_written(case: Case) -> None:
    writes = case.tensor_names()[1]
    for function in functions(case):
        arguments = case.make(0)
        before = map_tensors(arguments, torch.clone)
        returned = call(function, arguments)
        changed = set()
        for (name, now), (_, old) in zip(tensors_of(arguments), tensors_of(before), strict=True):
            if torch.equal(bits(now), bits(old)):
                continue
            changed.add(name)
            mask = mask_of(case, before, name, written=True)
            if mask is not None:
                assert torch.equal(bits(now[~mask]), bits(old[~mask])), f"rows of {name} that nothing named changed"
        assert changed == writes
        own = {tensor.untyped_storage().data_ptr() for _, tensor in tensors_of(arguments)}
        for tensor in returned:
            assert tensor.untyped_storage().data_ptr() not in own, "a result shares an argument's memory"


@pytest.mark.parametrize("case", [c for c in CASES if OPERATORS[c.operator].rows], ids=lambda case: case.name)
def test_only_named_rows_are_read(case: Case) -> None:
    """Poison in all others changes nothing."""
    operator = OPERATORS[case.operator]
    for function in functions(case):
        clean, poisoned = case.make(0), case.make(0)
        masks = {name: mask_of(case, poisoned, name, written=False) for name in operator.rows}
        for name, mask in masks.items():
            tensor = poisoned[name]
            tensor[~mask] = torch.nan if tensor.dtype.is_floating_point else 0x7F
        for a, b in zip(call(function, poisoned), call(function, clean), strict=True):
            assert same(a, b)
        for name in operator.writes:
            mask = masks.get(name)
            a, b = (poisoned[name], clean[name]) if mask is None else (poisoned[name][mask], clean[name][mask])
            assert same(a, b), name


@every_case
def test_everything_declared_as_read_matters(case: Case) -> None:
    """Of tensors of floats: other values give another result. (Index tensors could point anywhere.)"""
    reads, writes = case.tensor_names()
    for function in functions(case):
        for name in reads:
            base, other = case.make(0), case.make(0)
            value = other[name]
            if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
                continue
            other[name] = value * -0.5 - 1.0
            before = base[name].clone()
            pairs = list(zip(call(function, base), call(function, other), strict=True))
            pairs += [(base[written], other[written]) for written in writes - {name}]
            if name in writes:  # what it became where it changed
                changed = (base[name] != before) & ~(base[name].isnan() & before.isnan())
                pairs.append((base[name][changed], other[name][changed]))
            assert any(not same(a, b) for a, b in pairs), f"{name} is declared as read, but nothing depends on it"
