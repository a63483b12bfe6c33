"""An operator: one name, its implementations, and what each of its arguments is read or written for.

The declaration is the same for every implementation, so that a hazard checker can follow a Triton or numpy kernel
that no dispatcher sees. Choosing an implementation costs one dictionary look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

OPERATORS: dict[str, Operator] = {}  # type: ignore[type-arg]
"""Every operator by name, filled when the operator modules are imported."""


@dataclass(slots=True)
class Operator(Generic[P, R]):
    """Callable dispatcher.

    Args:
        name: unique; the folder under ``ops/`` and the function, dotted.
        reads, writes: names of tensor arguments read and written in place. What is returned is new memory.
        rows: for an argument that is touched only at some rows of its first dimension, the argument that holds
            those row numbers, or several.
        implementations: device type to function; "cpu" always there.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    rows: dict[str, str | tuple[str, ...]]
    implementations: dict[str, Callable[P, R]] = field(default_factory=dict)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        if not isinstance(first, torch.Tensor) or first.is_cpu:  # asked first: a device's name takes ten times as long
            return self.implementations["cpu"](*args, **kwargs)
        device = first.device.type
        implementation = self.implementations.get(device)
        if implementation is None:
            implementation = self.implementations["cpu"]  # plain torch runs on every device
        return implementation(*args, **kwargs)

    def register(self, device: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorator: add the implementation for a device type."""

        def add(function: Callable[P, R]) -> Callable[P, R]:
            assert device not in self.implementations, f"{self.name} already has a {device} implementation"
            self.implementations[device] = function
            return function

        return add


def operator(
    name: str,
    *,
    reads: tuple[str, ...],
    writes: tuple[str, ...] = (),
    rows: dict[str, str | tuple[str, ...]] | None = None,
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Decorator: make the plain torch implementation the operator ``name``; the first argument must be a tensor."""

    def make(function: Callable[P, R]) -> Operator[P, R]:
        assert name not in OPERATORS, f"operator {name} is declared twice"
        made: Operator[P, R] = Operator(name, reads, writes, rows or {}, {"cpu": function})
        OPERATORS[name] = made
        return made

    return make
