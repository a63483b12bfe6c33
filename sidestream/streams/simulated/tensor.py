"""Tensors of the simulated device (``device="sim"``) and of page-locked host memory, as torch sees them.

Both wrap a CPU view of a block. What torch is asked to do with them arrives here one aten operator at a time. torch
knows one Python device a process, so it is registered once, and factories such as ``torch.empty(device="sim")`` take
memory from the device that is active.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from sidestream.streams.simulated.memory import Storage

Dispatch = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
Make = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]


class _Hooks:
    """What a device plugs in; set by ``activate``."""

    dispatch: Dispatch | None = None
    make: Make | None = None


class WrapperTensor(torch.Tensor):
    """Base of both kinds.

    Attributes:
        elem: the CPU view. What it holds is what has run so far.
        storage_owner: keeps the block.
    """

    elem: torch.Tensor
    storage_owner: Storage
    device_name = "cpu"

    @staticmethod
    def __new__(cls, elem: torch.Tensor, storage: Storage) -> WrapperTensor:
        with torch.inference_mode(False):  # a view of a normal tensor must be one, also inside inference mode
            made: WrapperTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                elem.size(),
                strides=elem.stride(),
                storage_offset=elem.storage_offset(),
                dtype=elem.dtype,
                device=torch.device(cls.device_name),
            )
        made.elem = elem
        made.storage_owner = storage
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert _Hooks.dispatch is not None, "no simulated device is active"
        return _Hooks.dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # Without values: to print them would be a host read.
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.elem.untyped_storage()


class SimTensor(WrapperTensor):
    """On the device: operators on it are issued, not run."""

    device_name = "sim:0"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise TypeError("can't convert a sim tensor to numpy; use .cpu() or a copy into a host buffer and an event")


class HostTensor(WrapperTensor):
    """Page-locked host memory: the host's operators on it run at once and are watched; copies of it are issued."""

    def tolist(self) -> Any:
        return torch.clone(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """A copy: writes through an array could not be watched."""
        array = torch.clone(self).numpy()
        array.flags.writeable = False
        return array


def activate(dispatch: Dispatch, make: Make) -> None:
    """Make a device the one that serves torch; registers ``device="sim"`` at the first call."""
    first = _Hooks.dispatch is None
    _Hooks.dispatch, _Hooks.make = dispatch, make
    if first:
        _setup_privateuseone_for_python_backend("sim")
        _register_factories()


def _make(shape: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype | None) -> torch.Tensor:
    assert _Hooks.make is not None
    dtype = dtype or torch.get_default_dtype()
    if stride is None:
        stride = torch.empty(tuple(shape), device="meta").stride()
    return _Hooks.make(shape, stride, dtype)


_LIBRARY = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def _register_factories() -> None:
    """The few operators that torch calls without a tensor of ours; all other factories are built on them."""

    def empty(
        size: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        layout: object = None,
        device: object = None,
        pin_memory: bool | None = None,
        memory_format: object = None,
    ) -> torch.Tensor:
        return _make(size, None, dtype)

    def empty_strided(
        size: Sequence[int],
        stride: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        layout: object = None,
        device: object = None,
        pin_memory: bool | None = None,
    ) -> torch.Tensor:
        return _make(size, stride, dtype)

    def arange_step(
        start: Any,
        end: Any,
        step: Any = 1,
        *,
        dtype: torch.dtype | None = None,
        layout: object = None,
        device: object = None,
        pin_memory: bool | None = None,
    ) -> torch.Tensor:
        host = torch.arange(start, end, step, dtype=dtype)
        out = _make(host.shape, None, host.dtype)
        assert _Hooks.dispatch is not None
        _Hooks.dispatch(torch.ops.aten.arange.start_out, (start, end, step), {"out": out})
        return out

    def arange_start(start: Any, end: Any, **kwargs: Any) -> torch.Tensor:
        return arange_step(start, end, **kwargs)

    def arange(end: Any, **kwargs: Any) -> torch.Tensor:
        return arange_step(0, end, **kwargs)

    def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert _Hooks.dispatch is not None
        _Hooks.dispatch(torch.ops.aten.copy_.default, (target, source, non_blocking), {})
        return target

    for name, function in (
        ("empty.memory_format", empty),
        ("empty_strided", empty_strided),
        ("arange.start_step", arange_step),
        ("arange.start", arange_start),
        ("arange", arange),
        ("_copy_from", copy_from),
    ):
        _LIBRARY.impl(name, function, "PrivateUse1")  # type: ignore[no-untyped-call]
