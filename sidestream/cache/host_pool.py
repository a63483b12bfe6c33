"""The host pool: memory of the host that the device reads and writes, for KV blocks that left it."""

from __future__ import annotations

import mmap
import os
from types import TracebackType

import psutil
import torch

from sidestream.cache.groups import CacheGroup
from sidestream.errors import CapacityError

CHUNK_BYTES = 1 << 30
"""Memory is pinned in pieces of about this size: one call for all of it would block the driver for many seconds."""
SPARE_BYTES = 1 << 30
"""Left to the rest of the machine."""
ALIGN = 4096


def require_room(nbytes: int) -> None:
    """Check that the machine has memory for a host pool of so many bytes.

    Raises:
        CapacityError: it has less, with both figures.
    """
    available = psutil.virtual_memory().available
    if nbytes + SPARE_BYTES > available:
        raise CapacityError(
            f"a host pool of {nbytes} bytes and {SPARE_BYTES} bytes to spare are more than the {available} bytes of "
            "memory that this machine has left; lower hisparse_host_memory"
        )


class HostPool:
    """``num_blocks`` blocks a layer, each layer's in one piece, and behind them one that is scratch.

    On a CUDA device the memory is an anonymous file that other ranks of the node can map too (``fileno``), pinned here
    in chunks that split no block. On the other backends it is memory of the device itself.

    Raises:
        CapacityError: the machine has not so much memory left.
    """

    def __init__(self, group: CacheGroup, num_blocks: int, *, device: torch.device) -> None:
        self._group = group
        self.num_blocks = num_blocks
        self._block_bytes = group.rows_per_block * group.row_elems * group.dtype.itemsize
        self._layer_bytes = -(-(num_blocks + 1) * self._block_bytes // ALIGN) * ALIGN
        self.nbytes = self._layer_bytes * len(group.layers)
        self._registered: list[int] = []
        self._map: mmap.mmap | None = None
        self._fd = -1
        self._layers: dict[int, torch.Tensor] = {}
        num_blocks += 1
        rows = num_blocks * group.rows_per_block
        require_room(self.nbytes)
        if device.type != "cuda":
            for layer in group.layers:
                self._layers[layer] = torch.empty((rows, group.row_elems), dtype=group.dtype, device=device)
            return
        try:
            self._fd = os.memfd_create("sidestream host pool")
            os.ftruncate(self._fd, max(self.nbytes, ALIGN))
            self._map = mmap.mmap(self._fd, max(self.nbytes, ALIGN))
            whole = torch.frombuffer(self._map, dtype=torch.uint8)
            for i, layer in enumerate(group.layers):
                piece = whole[i * self._layer_bytes :][: num_blocks * self._block_bytes]
                self._pin(piece)
                self._layers[layer] = piece.view(group.dtype).view(rows, group.row_elems)
        except BaseException:
            self.close()
            raise

    def layer(self, layer: int) -> torch.Tensor:
        """[(num_blocks + 1) * rows_per_block, row_elems]."""
        return self._layers[layer]

    def fileno(self) -> int:
        """The file behind the memory, for a process that shares it; -1 where there is none."""
        return self._fd

    def close(self) -> None:
        """Give the memory back; whoever still has a view must not use it. Once is enough, twice does no harm."""
        self._layers.clear()
        while self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered.pop())  # type: ignore[no-untyped-call]
        self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> HostPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _pin(self, piece: torch.Tensor) -> None:
        """Chunks of whole blocks that begin on whole pages."""
        blocks = max(CHUNK_BYTES // self._block_bytes, 1)
        while blocks * self._block_bytes % ALIGN:
            blocks += 1
        step = blocks * self._block_bytes
        for start in range(0, piece.numel(), step):
            chunk = piece[start : start + step]
            error = torch.cuda.cudart().cudaHostRegister(chunk.data_ptr(), chunk.numel(), 0)  # type: ignore[no-untyped-call]
            if int(error) != 0:
                raise CapacityError(
                    f"pinning {chunk.numel()} bytes of the host pool failed with CUDA error {int(error)}; lower "
                    "hisparse_host_memory, or raise the limit on locked memory (ulimit -l)"
                )
            self._registered.append(chunk.data_ptr())
