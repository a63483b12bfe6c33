"""Turns what torch asks of tensors on the simulated device into issued work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from sidestream.streams.simulated import aten
from sidestream.streams.simulated.device import DeviceCore
from sidestream.streams.simulated.graph import DeviceError
from sidestream.streams.simulated.hazards import Touch
from sidestream.streams.simulated.memory import extent_of
from sidestream.streams.simulated.schedule import Rows
from sidestream.streams.simulated.tensor import HostTensor, SimTensor, WrapperTensor

_COPY = torch.ops.aten.copy_.default
_TO_COPY = torch.ops.aten._to_copy.default
_IS_PINNED = torch.ops.aten.is_pinned.default
_DETACH = torch.ops.aten.detach_.default


class Dispatcher:
    """Called with one aten operator and its arguments at a time.

    An operator becomes one node that reads and writes what its schema says; results get poisoned memory at once and
    their values when the node runs.
    """

    def __init__(self, core: DeviceCore) -> None:
        self._core = core
        self._shapes: dict[Any, list[tuple[Any, Any, torch.dtype]]] = {}

    def new(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> SimTensor:
        return SimTensor(*self._core.take(shape, stride, dtype=dtype))

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        info = aten.info_of(func)
        if func is _IS_PINNED:
            return isinstance(args[0], HostTensor)
        if func is _DETACH:
            return args[0]  # no tensor here has a gradient
        if info.composite:
            taken_apart = func.decompose(*args, **kwargs)
            if taken_apart is not NotImplemented:
                return taken_apart
        named = dict(aten.named_arguments(func, args, kwargs))
        if func is _COPY:
            return self._copy(args[0], args[1], bool(named.get("non_blocking", False)))
        if func is _TO_COPY and _leaves_device(args[0], kwargs):
            return self._to_host(args[0], kwargs)
        tensors = [t for value in named.values() for t in aten.tensors_in(value)]
        if not any(isinstance(t, SimTensor) for t in tensors):
            return self._on_host(func, args, kwargs, named)
        if info.view:
            return _wrap(func(*_plain(args), **_plain(kwargs)), like=tensors[0])
        return self._on_device(func, args, kwargs, named)

    def _on_device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], named: dict[str, Any]) -> Any:
        info = aten.info_of(func)
        by_rows = aten.row_index(func, named)
        touches = self._touches(info, named, by_rows)
        plain_args, plain_kwargs = _plain(args, staged=True), _plain(kwargs, staged=True)
        label = str(func)
        rows_of = None if by_rows is None else _elem(by_rows[1])
        row_touches = tuple(i for i, touch in enumerate(touches) if touch.by_rows is not None)

        def note_rows(rows: Rows) -> None:
            if rows_of is not None:
                for i in row_touches:
                    rows[i] = row_numbers(rows_of)

        if info.waits or aten.has_mask_index(func, named):
            self._core.issue(label, lambda rows: None, touches)
            self._core.host_wait(self._core.current.frontier, label)
            return self._keep(func(*plain_args, **plain_kwargs), info, named)
        if info.writes:

            def run_in_place(rows: Rows) -> None:
                note_rows(rows)
                func(*plain_args, **plain_kwargs)

            self._core.issue(label, run_in_place, touches)
            written = [v for name, v in named.items() if name in info.writes]
            return written[0] if len(written) == 1 else tuple(written)

        shapes = self._output_shapes(func, plain_args, plain_kwargs)
        outs = [self.new(*shape) for shape in shapes]
        targets = [out.elem for out in outs]

        def run(rows: Rows) -> None:
            note_rows(rows)
            made = func(*plain_args, **plain_kwargs)
            for target, value in zip(targets, _as_list(made), strict=True):
                target.copy_(value)

        written_touches = tuple(t for t in (self.touch(out, write=True) for out in outs) if t is not None)
        self._core.issue(label, run, (*touches, *written_touches))
        return outs[0] if _returns_one(func) else outs if _returns_list(func) else tuple(outs)

    def _keep(self, result: Any, info: aten.OpInfo, named: dict[str, Any]) -> Any:
        """Put the result of an operator that the host waited for on the device."""
        if info.writes:
            return next(v for name, v in named.items() if name in info.writes)
        if isinstance(result, torch.Tensor):
            out = self.new(result.shape, torch.empty_like(result, device="meta").stride(), result.dtype)
            self._copy(out, result, False)
            return out
        if isinstance(result, (tuple, list)):
            return type(result)(self._keep(item, info, named) for item in result)
        return result

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], named: dict[str, Any]) -> Any:
        """Page-locked memory used by the host itself."""
        info = aten.info_of(func)
        if info.view:
            return _wrap(func(*_plain(args), **_plain(kwargs)), like=args[0])
        self._core.host_access(str(func), self._touches(info, named, None))
        result = func(*_plain(args), **_plain(kwargs))
        if info.writes:
            return next(v for name, v in named.items() if name in info.writes)
        return result

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        on_device = [isinstance(t, SimTensor) for t in (target, source)]
        if not any(on_device):
            host = [t for t in (target, source) if isinstance(t, HostTensor)]
            touches = (self.touch(t, write=t is target) for t in host)
            self._core.host_access("copy on the host", tuple(t for t in touches if t is not None))
            _elem(target).copy_(_elem(source))
            return target
        pageable = not all(isinstance(t, WrapperTensor) for t in (target, source))
        blocks = not all(on_device) and (pageable or not non_blocking)
        label = f"copy {_place(source)} to {_place(target)}"
        if blocks:
            self._core.refuse_in_capture(f"{label} makes the host wait")
        taken, into = _elem(source), _elem(target)
        pairs = ((source, False), (target, True))
        touches = (self.touch(t, write=write) for t, write in pairs if isinstance(t, WrapperTensor))

        def run(rows: Rows) -> None:
            into.copy_(taken)

        self._core.issue(label, run, tuple(t for t in touches if t is not None))
        if blocks:
            self._core.host_wait(self._core.current.frontier, label)
        return target

    def _to_host(self, source: SimTensor, kwargs: dict[str, Any]) -> torch.Tensor:
        dtype = kwargs.get("dtype") or source.dtype
        out: torch.Tensor
        if kwargs.get("non_blocking"):
            out = HostTensor(*self._core.take_host(source.shape, dtype=dtype))
        else:
            self._core.refuse_in_capture("a copy to the host")
            out = torch.empty_like(source.elem, dtype=dtype)
        return self._copy(out, source, bool(kwargs.get("non_blocking")))

    def _output_shapes(self, func: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any, torch.dtype]]:
        """Found by running the CPU operator once on zeros: other ways to ask give other strides."""
        key = (func, _signature(args), _signature(kwargs))
        if key not in self._shapes:
            made = func(*_zeros(args), **_zeros(kwargs))
            self._shapes[key] = [(tuple(t.shape), t.stride(), t.dtype) for t in _as_list(made)]
        return self._shapes[key]

    def _touches(
        self, info: aten.OpInfo, named: dict[str, Any], by_rows: tuple[str, torch.Tensor] | None
    ) -> tuple[Touch, ...]:
        touches: list[Touch] = []
        for name, value in named.items():
            rows = by_rows is not None and by_rows[0] == name
            for tensor in aten.tensors_in(value):
                place = len(touches) if rows else None
                touch = self.touch(tensor, write=name in info.writes, by_rows=place)
                if touch is not None:
                    touches.append(touch)
        return tuple(touches)

    def touch(self, tensor: torch.Tensor, *, write: bool, by_rows: int | None = None) -> Touch | None:
        if not isinstance(tensor, WrapperTensor):
            return None
        extent = extent_of(tensor.elem)
        block = tensor.storage_owner.block
        if tensor.storage_owner.allocator is not self._core.allocator:
            raise DeviceError(
                f"a tensor taken at {block.taken} belongs to a simulated device that was replaced by a later one: one "
                "is active at a time, so what was built on the earlier can not be used any more"
            )
        return None if extent is None else Touch(block, extent, write, block.tenant, by_rows)


def row_numbers(index: torch.Tensor) -> np.ndarray:
    """Of a CPU index tensor, as it is now."""
    return index.reshape(-1).numpy().copy()


def _elem(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.elem if isinstance(tensor, WrapperTensor) else tensor


def _place(tensor: torch.Tensor) -> str:
    if isinstance(tensor, SimTensor):
        return "the device"
    return "page-locked memory" if isinstance(tensor, HostTensor) else "the host"


def _wrap(result: Any, *, like: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return type(like)(result, like.storage_owner)
    return type(result)(_wrap(item, like=like) for item in result)


def _plain(value: Any, *, staged: bool = False) -> Any:
    """Arguments for the CPU operator. ``staged``: it runs later, so host values are taken now."""
    if isinstance(value, WrapperTensor):
        if staged and isinstance(value, HostTensor):
            raise RuntimeError("Expected all tensors to be on the same device, but found sim:0 and page-locked memory")
        return value.elem
    if isinstance(value, torch.Tensor):
        if staged and value.dim() > 0:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found sim:0 and {value.device}")
        return value.clone() if staged else value
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "sim" else value
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item, staged=staged) for item in value)
    if isinstance(value, dict):
        return {name: _plain(item, staged=staged) for name, item in value.items()}
    return value


def _leaves_device(source: Any, kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return isinstance(source, SimTensor) and device is not None and torch.device(device).type == "cpu"


def _as_list(result: Any) -> Iterable[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _returns_one(func: Any) -> bool:
    returns = func._schema.returns
    return len(returns) == 1 and not _returns_list(func)


def _returns_list(func: Any) -> bool:
    return any("List" in str(r.type) for r in func._schema.returns)


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(_signature(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _signature(item)) for name, item in value.items())
    return (type(value), value)


def _zeros(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
    if isinstance(value, (list, tuple)):
        return type(value)(_zeros(item) for item in value)
    if isinstance(value, dict):
        return {name: _zeros(item) for name, item in value.items()}
    return value
