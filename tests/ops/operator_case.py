"""A call of an operator as data, and what tests do with its tensors whatever the operator is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from sidestream.core.ring import RingPlan
from sidestream.ops.operator import OPERATORS

Arguments = dict[str, Any]


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
    """Every tensor with its argument's name; those of a plan share one."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, RingPlan):
            for part in (value.carry_rows, value.window_rows, value.keep_tokens, value.keep_rows):
                yield name, part


def map_tensors(arguments: Arguments, change: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
    def mapped(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        if isinstance(value, RingPlan):
            parts = ("carry_rows", "window_rows", "keep_tokens", "keep_rows")
            return replace(value, **{part: change(getattr(value, part)) for part in parts})
        return value

    return {name: mapped(value) for name, value in arguments.items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, where any NaN equals any other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
