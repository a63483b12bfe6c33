"""A step's host integers on their way to the device: one asynchronous copy, always to the same place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from sidestream.errors import CapacityError
from sidestream.streams.backend import StreamBackend

KEPT_VIEWS = 4096
"""Views of the device's buffer that are kept: a decode step has twenty, always the same, and making them takes a GPU's
host some 50 us."""
_ALIGN = 2
"""int64 elements: every array starts on 16 bytes, the widest access of a GPU thread."""

Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Narrow:
    """The first columns of an array of int64 [R, columns] that holds zeros behind them.

    Attributes:
        values: [R, C], at least one column and at most ``columns``.
    """

    values: Array
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of the whole array."""
        return len(self.values), self.columns

    @property
    def size(self) -> int:
        """Elements of the whole array."""
        return len(self.values) * self.columns

    def whole(self) -> Array:
        """All columns."""
        wide = np.zeros(self.shape, dtype=np.int64)
        wide[:, : self.values.shape[1]] = self.values
        return wide


class PackedUpload:
    """Packs int64 arrays into page-locked memory and copies them to the device in one go.

    Arrays land one behind the other, so an array's address depends on the sizes of those before it and on nothing
    else: the same shapes in the same order lie at the same addresses in every step, as captured graphs need. What the
    last call placed is overwritten, in stream order. Of a ``Narrow`` array its columns alone travel, behind the others;
    a copy on the device brings them to its place, which ends where the buffer does and depends on its own shape.

    Args:
        capacity: int64 elements, padding of 16 bytes an array included; see ``elements``.
        depth: page-locked buffers used in turn. The host waits only if the copy ``depth`` calls ago is still to run.
    """

    def __init__(self, backend: StreamBackend, capacity: int, *, depth: int = 2) -> None:
        self._backend = backend
        self._device = torch.zeros(capacity, dtype=torch.int64, device=backend.device)
        self._hosts = [backend.host_buffer((capacity,), dtype=torch.int64) for _ in range(depth)]
        self._copied = [backend.new_event(external=False) for _ in range(depth)]
        self._calls = 0
        self._wide: tuple[int, int] | None = None  # shape of the narrow array that is there, zeros behind its columns,
        self._filled = 0  # which are so many
        self._view = lru_cache(KEPT_VIEWS)(self._make_view)

    def _make_view(self, start: int, shape: tuple[int, ...]) -> torch.Tensor:
        return self._device[start : start + math.prod(shape)].view(shape)

    @property
    def nbytes(self) -> int:
        """Device bytes."""
        return self._device.numel() * self._device.itemsize

    @staticmethod
    def elements(sizes: Sequence[int]) -> int:
        """Capacity that arrays of these sizes need."""
        return sum(_aligned(size) for size in sizes)

    def place(self, arrays: Sequence[Array | Narrow]) -> list[torch.Tensor]:
        """Copy the arrays, of which one may be ``Narrow``, to the device on the current stream; the tensors, of equal
        shapes.

        Raises:
            CapacityError: they do not fit.
        """
        narrow, starts, end = None, [], 0
        for array in arrays:
            if isinstance(array, Narrow):
                assert narrow is None, "one array may be narrow"
                narrow = array
                starts.append(self._device.numel() - _aligned(array.size))
            else:
                starts.append(end)
                end += _aligned(array.size)
        staged, wide = end, 0
        if narrow is not None:
            end, wide = end + narrow.values.size, _aligned(narrow.size)
        if end + wide > self._device.numel():
            raise CapacityError(
                f"a step's index tensors need {end + wide} elements, and {self._device.numel()} were set aside for them"
            )
        packed = np.zeros(end, dtype=np.int64)
        for start, array in zip(starts, arrays, strict=True):
            if isinstance(array, Narrow):
                packed[staged:end] = array.values.reshape(-1)
            else:
                packed[start : start + array.size] = array.reshape(-1)
        turn = self._calls % len(self._hosts)
        host, copied = self._hosts[turn], self._copied[turn]
        if self._calls >= len(self._hosts):
            self._backend.synchronize_event(copied)
        self._calls += 1
        if narrow is None or self._wide != narrow.shape:  # what is launched now may lie where the last narrow one did
            self._wide = None
        host[:end].copy_(torch.from_numpy(packed))
        try:
            self._device[:end].copy_(host[:end], non_blocking=True)
        finally:  # an interrupt may come behind the launch
            self._backend.record(copied)
        if narrow is not None:
            self._widen(narrow, staged)
        return [self._view(start, array.shape) for start, array in zip(starts, arrays, strict=True)]

    def _widen(self, narrow: Narrow, staged: int) -> None:
        """Bring columns from where they were sent to their place, and zeros behind them where others may stand."""
        start, shape, count = self._device.numel() - _aligned(narrow.size), narrow.shape, narrow.values.shape[1]
        place = self._view(start, shape)
        if self._wide is None:
            self._filled = 0
            place.zero_()
            self._wide = shape
        filled, self._filled = self._filled, max(self._filled, count)  # an interrupt may come behind either launch
        if filled > count:
            place[:, count:filled].zero_()
        place[:, :count].copy_(self._view(staged, narrow.values.shape))
        self._filled = count


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
