"""Memory at fixed addresses that all captured shapes share.

A captured segment reads and writes addresses. What it takes from an eager break, or gives to one, must therefore lie
where it lay at capture: weak references to a segment's own tensors would alias silently with those of another shape,
strong ones would keep the graph pool from sharing memory between shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch


class StaticBuffers:
    """Named buffers [max_rows, ..], made at the first request and then only viewed.

    Implements ``core.protocols.Boundary``.

    Args:
        max_rows: of every buffer; shapes ask for their first rows.
        fewer_rows: buffer name -> its rows, where no shape ever needs ``max_rows`` of them.
    """

    def __init__(self, max_rows: int, device: torch.device, *, fewer_rows: Mapping[str, int] | None = None) -> None:
        self.max_rows = max_rows
        self._fewer_rows = dict(fewer_rows or {})
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._frozen = False

    @property
    def nbytes(self) -> int:
        return sum(buffer.numel() * buffer.itemsize for buffer in self._buffers.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._buffers)

    def freeze(self) -> None:
        """From here on a new buffer is an error: inside a capture it would come from the graphs' pool."""
        self._frozen = True

    def thaw(self) -> None:
        """Allow new buffers again, outside of captures."""
        self._frozen = False

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The first ``shape[0]`` rows of buffer ``name``, holding what its last user left there."""
        rows, rest = shape[0], tuple(shape[1:])
        most = self._fewer_rows.get(name, self.max_rows)
        assert rows <= most, f"{rows} rows of static buffer {name!r}, which has {most}"
        buffer = self._buffers.get(name)
        if buffer is None:
            assert not self._frozen, (
                f"static buffer {name!r} is first asked for inside a capture; warm up with its shape"
            )
            buffer = torch.zeros(most, *rest, dtype=dtype, device=self._device)
            self._buffers[name] = buffer
        assert buffer.shape[1:] == rest, f"static buffer {name!r} has rows of {tuple(buffer.shape[1:])}, not {rest}"
        assert buffer.dtype == dtype, f"static buffer {name!r} is {buffer.dtype}, not {dtype}"
        return buffer[:rows]

    def hold(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy ``tensor`` [rows, ..] into buffer ``name``; the copy."""
        held = self.take(name, tuple(tensor.shape), tensor.dtype)
        held.copy_(tensor)
        return held

    def existing(self, name: str, rows: int) -> torch.Tensor:
        """The first rows of a buffer that was taken before."""
        return self._buffers[name][:rows]

    def poison(self) -> None:
        """Overwrite every buffer on the current stream, so that a replay which does not write one is seen: floats with
        NaN, integers with their smallest value, unsigned ones with their largest, since zero would look like data."""
        for buffer in self._buffers.values():
            if buffer.is_floating_point():
                buffer.fill_(math.nan)
            else:
                limits = torch.iinfo(buffer.dtype)
                buffer.fill_(limits.min or limits.max)
