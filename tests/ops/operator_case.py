"""A call of an operator as data, and what tests do with its tensors whatever the operator is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sidestream.core.batch import Split
from sidestream.core.ring import RingPlan
from sidestream.ops.moe import ExpertSum
from sidestream.ops.operator import OPERATORS

Arguments = dict[str, Any]
Results = list[tuple[str, torch.Tensor]]
"""What a call returned, then the arguments that it wrote."""


@dataclass(frozen=True)
class Case:
    """``make(seed)`` gives the arguments by name, the first one first. ``captured``: of a uniform decode step."""

    operator: str
    variant: str
    make: Callable[[int], Arguments]
    captured: bool = True

    @property
    def name(self) -> str:
        return f"{self.operator}[{self.variant}]" if self.variant else self.operator

    def tensor_names(self) -> tuple[set[str], set[str]]:
        """Declared to be (read, written)."""
        declared = OPERATORS[self.operator]
        return set(declared.reads), set(declared.writes)


def call(function: Callable[..., Any], arguments: Arguments) -> tuple[torch.Tensor, ...]:
    """The tensors returned."""
    (first, *names) = arguments
    result = function(arguments[first], **{name: arguments[name] for name in names})
    if result is None:
        return ()
    return tuple(t for t in result if t is not None) if isinstance(result, tuple) else (result,)


def tensors_of(arguments: Arguments) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor with its argument's name; those of a plan, or of a pending sum, share one."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, RingPlan):
            for part in value.tensors:
                yield name, part
        elif isinstance(value, ExpertSum):
            for part in (value.partial, value.weights, value.ids):
                yield name, part


def map_tensors(arguments: Arguments, change: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
    def mapped(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        if isinstance(value, RingPlan):
            return value.moved([change(tensor) for tensor in value.tensors])
        if isinstance(value, ExpertSum):
            parts = [change(tensor) for tensor in (value.partial, value.weights, value.ids)]
            return ExpertSum(*parts, value.num_shared, value.dtype)
        return value

    return {name: mapped(value) for name, value in arguments.items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, where any NaN equals any other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def results_of(case: Case, arguments: Arguments, returned: tuple[torch.Tensor, ...]) -> Results:
    written = case.tensor_names()[1]
    results = [(f"result {i}", tensor) for i, tensor in enumerate(returned)]
    return results + [(name, tensor) for name, tensor in tensors_of(arguments) if name in written]


def spoil(tensors: tuple[torch.Tensor, ...]) -> None:
    """Fill with what no result is."""
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 0x7F)


def overwrite(buffers: Arguments, values: Arguments) -> None:
    """Other inputs in the same memory."""
    for (_, buffer), (_, value) in zip(tensors_of(buffers), tensors_of(values), strict=True):
        buffer.copy_(value)


def rows_named(case: Case, arguments: Arguments, name: str, *, written: bool) -> torch.Tensor | None:
    """Row numbers of an argument that may be touched, with repetitions. None if all may be."""
    names = OPERATORS[case.operator].rows.get(name)
    if names is None:
        return None
    parts = [_rows_in(arguments[one], written) for one in ((names,) if isinstance(names, str) else names)]
    index = torch.cat(parts)
    return index[index >= 0]


def _rows_in(index: Any, written: bool) -> torch.Tensor:
    if isinstance(index, RingPlan):
        copied = [] if index.copy_to is None else [index.copy_to]
        return torch.cat([index.keep_rows, *copied, *([] if written else [index.carry_rows])])
    if isinstance(index, tuple) and any(isinstance(part, tuple) for part in index):
        splits: list[Split] = [split for part in index for split in part]
        return torch.tensor([split.slot for split in splits])
    return torch.as_tensor(index).reshape(-1).long()
