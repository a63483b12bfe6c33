"""Kernels of KDA's decode step in torch, see ``tests.ops.gluon_in_torch``: one role, and copies in groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from triton.language import constexpr

from tests.ops.gluon_in_torch import Front, Pointer, Shared, language, layout, with_functions


class Copies:
    """Asynchronous copies: none arrives before a wait for its group."""

    def __init__(self) -> None:
        self.open, self.groups = list[Callable[[], Any]](), deque[list[Callable[[], Any]]]()

    def async_copy_global_to_shared(self, target: Shared, source: Pointer, mask: torch.Tensor | None = None) -> None:
        def copy() -> None:
            target.data.copy_(source.load(mask))

        target.data.fill_(torch.nan)
        self.open.append(copy)

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, outstanding: int) -> None:
        assert not self.open, "a copy belongs to no group"
        while len(self.groups) > outstanding:
            for copy in self.groups.popleft():
                copy()


def run(
    kernel: Any,
    helpers: tuple[Any, ...],
    program: tuple[int, int],
    arguments: tuple[Any, ...],
    *,
    late: tuple[int, ...],
    **own: Any,
) -> None:
    """One program of a kernel with the functions of its module that it calls.

    Args:
        program: its numbers; arguments: of the kernel, tensors of memory as they are.
        late: numbers of the arguments that the kernel in front writes: NaN until it was waited for.
        own: names of the module that are the test's.
    """
    copies = Copies()
    front = Front([arguments[at] for at in late])

    names: dict[str, Any] = {
        "gl": language(program, DotOperandLayout=layout, rsqrt=torch.rsqrt),
        "async_copy": copies,
        "gdc_wait": front.wait,
    }
    names["gdc_launch_dependents"] = lambda: None
    names |= {name: value.value for name, value in kernel.fn.__globals__.items() if isinstance(value, constexpr)}
    names |= own
    with_functions(names, (*helpers, kernel))
    names[kernel.fn.__name__](*(Pointer(x) if isinstance(x, torch.Tensor) else x for x in arguments))
    assert not front.coming, "the kernel in front was not waited for"
    assert not copies.open, "a copy belongs to no group"
    assert not any(copies.groups), "a program ends while copies to its memory are on their way"
