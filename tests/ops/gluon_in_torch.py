"""Gluon's language in torch, since it has no interpreter: kernels' own source run on a CPU, a program at a time.

Each role of a program is a thread, one runs at a time, and which one goes on where it could wait is drawn from a seed.
It knows nothing of the warps in a role, nor of layouts; it does catch wrong places, masks and formulas, roles that wait
for each other, what is used before it is there, and memory overwritten under an open product.
"""

from __future__ import annotations

import math
import random
import threading
import types
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


class Pointer:
    """Places in one flat memory."""

    def __init__(self, memory: torch.Tensor, place: Any = 0) -> None:
        self.memory, self.place = memory.view(-1), torch.as_tensor(place)
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.place + offset)

    def load(self, mask: torch.Tensor | None = None, other: float = 0) -> torch.Tensor:
        place = self.place.long()
        if mask is None:
            return self.memory[place]
        mask = mask.broadcast_to(place.shape)
        return torch.where(mask, self.memory[torch.where(mask, place, 0)], torch.tensor(other).to(self.memory))

    def store(self, value: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        place = self.place.long()
        mask = torch.ones_like(place, dtype=torch.bool) if mask is None else mask.broadcast_to(place.shape)
        self.memory[place[mask]] = value.broadcast_to(place.shape)[mask]


class Shared:
    """Shared memory, NaN until it is written; products see it as it is."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def index(self, i: int) -> Shared:
        return Shared(self.data[i])

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.data[start : start + length])

    def permute(self, order: tuple[int, int]) -> Shared:
        return Shared(self.data.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], _layout: object) -> Shared:
        return Shared(self.data.view(-1).view(dtype)[: math.prod(shape)].view(shape))

    def store(self, value: torch.Tensor) -> None:
        assert value.dtype is self.data.dtype
        assert value.shape == self.data.shape
        self.data.copy_(value)

    def load(self, layout: object) -> torch.Tensor:
        return self.data.clone()


class Front:
    """The kernel in front: what it writes is NaN until it was waited for."""

    def __init__(self, late: Sequence[torch.Tensor]) -> None:
        self.coming = [(memory, memory.clone()) for memory in late]
        for memory in late:
            memory.fill_(torch.nan)

    def wait(self) -> None:
        for memory, value in self.coming:
            memory.copy_(value)
        self.coming.clear()


class Roles:
    """Threads of which one runs at a time; ``engine`` does one thing that goes on by itself, if there is one."""

    def __init__(self, seed: int, engine: Callable[[], bool] = lambda: False) -> None:
        self.random, self.turns, self.failures = random.Random(seed), threading.Condition(), list[BaseException]()
        self.waits: dict[int, Callable[[], bool]] = {}
        self.running: int | None = None
        self.engine = engine

    def _ready(self) -> list[int]:
        return [role for role, wait in self.waits.items() if wait()]

    def _choose(self) -> None:
        while self.random.random() < 0.5 and self.engine():
            pass
        while not (ready := self._ready()) and self.engine():
            pass
        assert ready or not self.waits or self.failures, "every role waits"
        self.running = self.random.choice(ready or [*self.waits, -1])
        self.turns.notify_all()

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        """Let another role go on until the condition holds and this one is drawn."""
        me = threading.get_ident()
        with self.turns:
            self.waits[me] = until
            self._choose()
            self.turns.wait_for(lambda: self.running == me or bool(self.failures), timeout=30)
            assert not self.failures, "another role failed"
            assert self.running == me, "no turn in 30 s"

    def run(self, bodies: list[Callable[[], object]]) -> None:
        begun = threading.Barrier(len(bodies))

        def role(body: Callable[[], object]) -> None:
            me = threading.get_ident()
            with self.turns:
                self.waits[me] = lambda: True
            begun.wait()
            try:
                with self.turns:
                    if self.running is None:
                        self._choose()
                    self.turns.wait_for(lambda: self.running == me or bool(self.failures))
                if self.failures:
                    return
                body()
                with self.turns:
                    del self.waits[me]
                    self._choose()
            except BaseException as failure:  # noqa: BLE001  raised again by the caller
                with self.turns:
                    self.failures.append(failure)
                    self.turns.notify_all()

        threads = [threading.Thread(target=role, args=(body,), daemon=True) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if self.failures:
            raise self.failures[0]
        assert not any(thread.is_alive() for thread in threads), "a role did not end in 60 s"


@dataclass(slots=True)
class Barrier:
    """In shared memory: a phase is over when ``count`` have arrived and no bytes are still to come."""

    count: int
    missing: int
    bytes: int = 0
    phase: int = 0

    def arrive(self, count: int = 0, *, bytes: int = 0) -> None:
        self.missing, self.bytes = self.missing - count, self.bytes + bytes
        assert self.missing >= 0, "more arrivals than a phase has"
        if not self.missing and not self.bytes:
            self.phase, self.missing = self.phase + 1, self.count


class Sum:
    """Products added up, of which some were not waited for: no value yet, but more may be added."""

    def __init__(self, value: torch.Tensor, chain: object) -> None:
        self.value, self.chain = value, chain


@dataclass(slots=True)
class Product:
    """That has been started: the sum it belongs to, and what it must still find in memory when it ends."""

    chain: object
    reads: list[tuple[Shared, torch.Tensor]]


class Machine:
    """One program with its barriers and products; ``sums`` may be open at once in a role."""

    def __init__(self, seed: int, *, sums: int = 1, engine: Callable[[], bool] = lambda: False) -> None:
        self.roles, self.sums = Roles(seed, engine), sums
        self.barriers: dict[int, Barrier] = {}
        self.products: dict[int, deque[Product]] = {}

    def barrier(self, memory: Shared) -> Barrier:
        return self.barriers[memory.data.data_ptr()]

    def init(self, barrier: Shared, *, count: int) -> None:
        self.barriers[barrier.data.data_ptr()] = Barrier(count, count)

    def arrive(self, barrier: Shared, *, count: int, pred: bool = True) -> None:
        if pred:
            self.barrier(barrier).arrive(count)
        self.roles.pause()

    def wait(self, barrier: Shared, phase: int) -> None:
        state = self.barrier(barrier)
        self.roles.pause(lambda: state.phase & 1 != phase)

    def product(self, a: Shared, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Sum:
        assert is_async
        known = isinstance(acc, Sum)
        chain, before = (acc.chain, acc.value) if known else (object(), acc)
        started = self.products.setdefault(threading.get_ident(), deque())
        started.append(Product(chain, [(a, a.data.clone()), (b, b.data.clone())]))
        assert len({id(product.chain) for product in started}) <= self.sums, "a sum starts while others are open"
        value = a.data.float() @ b.data.float()
        return Sum(value + before if use_acc else value, chain)

    def wait_product(self, outstanding: int, deps: list[Sum]) -> Any:
        """The sums of which nothing is open, as values."""
        self.roles.pause()
        started = self.products.get(threading.get_ident(), deque())
        while len(started) > outstanding:
            for memory, seen in started.popleft().reads:
                assert torch.equal(memory.data, seen), "memory changed, or held NaN, under an open product"
        still = {id(product.chain) for product in started}
        done = tuple(dep if id(dep.chain) in still else dep.value for dep in deps)
        return done if len(done) > 1 else done[0]

    def specialize(self, parts: list[tuple[Any, Any]], _warps: object, _registers: object) -> None:
        self.roles.run([lambda part=part: part[0](*part[1]) for part in parts])
        assert not any(self.products.values()), "a role ends while products are open"

    @property
    def mbarrier(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(init=self.init, arrive=self.arrive, wait=self.wait, MBarrierLayout=layout)


def layout(*_args: Any, **_kwargs: Any) -> None:
    """Of any kind: there is none."""


def allocate(dtype: torch.dtype, shape: list[int], _layout: object) -> Shared:
    return Shared(torch.full([*shape], 0xFF, dtype=torch.uint8).repeat_interleave(dtype.itemsize, -1).view(dtype))


def language(program: tuple[int, int], grid: tuple[int, int] = (1, 1), **own: Any) -> types.SimpleNamespace:
    """What kernels know as ``gl``, for one program of a grid; ``own`` names are the test's."""
    same = (
        "uint8",
        "int32",
        "int64",
        "float32",
        "bfloat16",
        "exp",
        "exp2",
        "log",
        "log2",
        "sqrt",
        "maximum",
        "reshape",
    )
    names: dict[str, Any] = {name: getattr(torch, name) for name in same}
    layouts = ("BlockedLayout", "DistributedLinearLayout", "SharedLinearLayout", "SliceLayout", "SwizzledSharedLayout")
    names |= dict.fromkeys((*layouts, "NVMMADistributedLayout"), layout)
    names |= {
        "NVMMASharedLayout": type(
            "NVMMASharedLayout", (), {"__new__": layout, "get_default_for": staticmethod(layout)}
        ),
        "allocate_shared_memory": allocate,
        "arange": lambda first, end, layout: torch.arange(first, end),
        "broadcast": torch.broadcast_tensors,
        "cdiv": lambda a, b: -(-a // b),
        "constexpr": None,
        "convert_layout": lambda x, layout, assert_trivial=False: x,
        "full": lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        "join": lambda a, b: torch.stack([a, b], dim=-1),
        "load": lambda source, mask=None, other=0: source.load(mask, other),
        "max": lambda x, axis: x.amax(axis),
        "minimum": lambda x, y: torch.minimum(torch.as_tensor(x), torch.as_tensor(y)),
        "num_programs": lambda axis: grid[axis],
        "program_id": lambda axis: torch.tensor(program[axis]),
        "static_range": range,
        "store": lambda target, value, mask=None: target.store(value, mask),
        "sum": lambda x, axis: x.sum(axis),
        "thread_barrier": lambda: None,
        "where": lambda mask, x, y: torch.where(mask, torch.as_tensor(x), torch.as_tensor(y)),
        "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    }
    return types.SimpleNamespace(**names | own)


def with_functions(names: dict[str, Any], functions: Sequence[Any]) -> dict[str, Any]:
    """``names`` and the bodies of compiled functions, which then see these names and no others."""
    for function in functions:
        name = function.fn.__name__
        names[name] = types.FunctionType(function.fn.__code__, names, name)
    return names


def functions_of(module: Any) -> list[Any]:
    """All that a module has for the device, its own and imported."""
    return [found for found in vars(module).values() if hasattr(getattr(found, "fn", None), "__code__")]
