"""Gluon's language in torch, for kernels of KDA's decode step: their own source run on a CPU, a program at a time.

It knows nothing of threads, so it says nothing about barriers or layouts; it does catch wrong places, masks and
formulas, a state that is used before its copy was waited for, and what is read too soon of the kernel in front.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from triton.language import constexpr


class Pointer:
    """Places in one flat memory."""

    def __init__(self, memory: torch.Tensor, place: Any = 0) -> None:
        self.memory, self.place = memory.view(-1), torch.as_tensor(place)
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.place + offset)

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """Bytes from the memory's start."""
        return (self.place * self.memory.itemsize).to(dtype)

    def load(self, mask: torch.Tensor | None = None, other: float = 0) -> torch.Tensor:
        if mask is None:
            return self.memory[self.place]
        mask = mask.broadcast_to(self.place.shape)
        return torch.where(mask, self.memory[torch.where(mask, self.place, 0)], torch.tensor(other).to(self.memory))


class Shared:
    """Shared memory, NaN until it is written."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def index(self, i: int) -> Shared:
        return Shared(self.data[i])

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.data[start : start + length])

    def store(self, value: torch.Tensor) -> None:
        self.data.copy_(value)

    def load(self, layout: object) -> torch.Tensor:
        return self.data.clone()


class Copies:
    """Asynchronous copies: none arrives before a wait for its group."""

    def __init__(self) -> None:
        self.open, self.groups = list[Callable[[], Any]](), deque[list[Callable[[], Any]]]()

    def async_copy_global_to_shared(self, target: Shared, source: Pointer, mask: torch.Tensor) -> None:
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


def _store(target: Pointer, value: torch.Tensor, mask: torch.Tensor | None = None, cache_modifier: str = "") -> None:
    if mask is None:
        target.memory[target.place] = value
    else:
        mask = mask.broadcast_to(target.place.shape)
        target.memory[target.place[mask]] = value[mask]


def run(
    kernel: Any,
    helpers: tuple[Any, ...],
    program: tuple[int, int],
    grid: tuple[int, int],
    arguments: tuple[Any, ...],
    *,
    late: tuple[int, ...],
) -> list[tuple[int, int]]:
    """One program of a kernel with the functions of its module that it calls.

    Args:
        program, grid: its numbers, and how many there are; arguments: of the kernel, tensors of memory as they are.
        late: numbers of the arguments that the kernel in front writes: NaN until it was waited for.
    Returns:
        What the L2 cache was asked for: bytes of a memory, from and to.
    """
    asked: list[tuple[int, int]] = []
    copies = Copies()
    coming = {at: arguments[at].clone() for at in late}
    for at in late:
        arguments[at].fill_(torch.nan)

    def gdc_wait() -> None:
        while coming:
            at, value = coming.popitem()
            arguments[at].copy_(value)

    def ask(_code: str, _operands: str, given: list[torch.Tensor], **_options: Any) -> None:
        places, sizes = given
        asked.extend((int(at), int(at + size)) for at, size in zip(places, sizes, strict=True) if size)

    def layout(*_args: Any, **_kwargs: Any) -> None:
        return None

    gl = types.SimpleNamespace(
        **{name: getattr(torch, name) for name in ("int32", "int64", "float32", "exp", "log", "sqrt")},
        minimum=lambda x, y: torch.minimum(torch.as_tensor(x), torch.as_tensor(y)),
        where=lambda mask, x, y: torch.where(mask, torch.as_tensor(x), torch.as_tensor(y)),
        convert_layout=lambda x, layout, assert_trivial: x,
        constexpr=None,
        static_range=range,
        **dict.fromkeys(("BlockedLayout", "SliceLayout", "SwizzledSharedLayout"), layout),
        allocate_shared_memory=lambda dtype, shape, layout: Shared(torch.full(shape, torch.nan, dtype=dtype)),
        arange=lambda first, end, layout: torch.arange(first, end),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        sum=lambda x, axis: x.sum(axis),
        thread_barrier=lambda: None,
        program_id=lambda axis: torch.tensor(program[axis]),
        num_programs=lambda axis: grid[axis],
        inline_asm_elementwise=ask,
        load=lambda source, mask=None, other=0: source.load(mask, other),
        store=_store,
    )
    names: dict[str, Any] = {"gl": gl, "async_copy": copies, "gdc_wait": gdc_wait}
    names["gdc_launch_dependents"] = lambda: None
    names |= {name: value.value for name, value in kernel.fn.__globals__.items() if isinstance(value, constexpr)}
    for function in (*helpers, kernel):
        name = function.fn.__name__
        names[name] = types.FunctionType(function.fn.__code__, names, name)
    names[kernel.fn.__name__](*(Pointer(x) if isinstance(x, torch.Tensor) else x for x in arguments))
    assert not coming, "the kernel in front was not waited for"
    assert not copies.open, "a copy belongs to no group"
    assert not any(copies.groups), "a program ends while copies to its memory are on their way"
    return asked
