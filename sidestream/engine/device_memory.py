"""What a CUDA device says about its memory: the driver's figure, and of it what torch's allocator accounts for."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from sidestream.errors import CapacityError

GIB = 2**30
MOST_CONTEXT = 3 * GIB // 2
"""More in use before anything was allocated is not one context (0.5 GiB on an H200): others use the device."""
MOST_BESIDE = 4 * GIB
"""More than that beside torch's allocator is not kernels and graphs, so others use the device."""
SHARED_CONTEXT = GIB
"""What context, kernels and graph nodes are taken to need where the driver's figure does not tell."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Bytes that torch's allocator holds.

    Attributes:
        live: in tensors, outside of graphs.
        free: for tensors to come, outside of graphs.
        pools: of graphs.
    """

    live: int
    free: int
    pools: int


class DeviceMemory:
    """Readings of one CUDA device, in bytes.

    The driver counts everything on the device, whoever uses it. Where other processes do, whose memory is whose cannot
    be told, and ``SHARED_CONTEXT`` stands for what the engine has beside torch's allocator. What torch held in this
    process before (of another engine, say) is left out.

    Attributes:
        total: of the device.
        shared: others use it.
        context: in use before the engine took anything.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        release()
        self.total = torch.cuda.mem_get_info(device)[1]
        self._others = Segments(0, 0, 0)
        self._others = self.segments()
        self._before = torch.cuda.memory_reserved(device)
        beside = self._beside_torch()
        self.shared = beside > MOST_CONTEXT
        self.context = SHARED_CONTEXT if self.shared else beside

    def _beside_torch(self) -> int:
        torch.cuda.synchronize(self.device)
        return self.total - torch.cuda.mem_get_info(self.device)[0] - torch.cuda.memory_reserved(self.device)

    def in_use(self) -> int:
        """By the engine: the driver's figure, where nobody else uses the device."""
        return self.beside_torch() + self.reserved()

    def reserved(self) -> int:
        """Of it, what torch's allocator took from the driver."""
        return torch.cuda.memory_reserved(self.device) - self._before

    def beside_torch(self) -> int:
        """Of it, the rest: context, kernels and libraries, nodes of graphs."""
        beside = self._beside_torch()
        self.shared |= beside > MOST_BESIDE
        return max(self.context, SHARED_CONTEXT) if self.shared else beside

    def segments(self) -> Segments:
        """What torch's allocator took from the driver, by use."""
        live = free = pools = 0
        for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
            if tuple(segment["segment_pool_id"]) != (0, 0):
                pools += int(segment["total_size"])
            else:
                live += int(segment["allocated_size"])
                free += int(segment["total_size"]) - int(segment["allocated_size"])
        others = self._others
        return Segments(live - others.live, free - others.free, pools - others.pools)

    def pinned(self) -> int:
        """Page-locked host memory that torch holds in this process."""
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))

    def enforce(self, budget: int) -> None:
        """From here on torch's allocator gives unused memory back, or fails, before ``in_use`` passes ``budget``.

        It holds for the whole process, until another engine is built or ``lift`` is called.

        Raises:
            CapacityError: more is in use already.
        """
        in_use = self.in_use()
        if in_use > budget:
            raise CapacityError(
                f"{in_use} bytes of the device are in use once the engine is ready, more than the memory budget of "
                f"{budget} bytes; raise memory_limit"
            )
        allowed = budget - self.beside_torch() + self._before
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / self.total), self.device)

    def lift(self) -> None:
        """Let the allocator take what it wants."""
        torch.cuda.set_per_process_memory_fraction(1.0, self.device)


def release() -> None:
    """Give memory that no tensor holds back to the driver. (Workspaces of cuBLAS stay: live graphs may use them.)"""
    gc.collect()
    torch.cuda.empty_cache()
