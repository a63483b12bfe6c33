"""What a CUDA device says about its memory: the driver's figure, and of it what torch's allocator accounts for."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from sidestream.errors import CapacityError


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

    The driver's figure is everything in use on the device, whoever uses it; only what torch held in this process
    before (of another engine, say) is left out.

    Attributes:
        total: of the device.
        context: in use before the engine took anything: the CUDA context, and other processes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        release()
        torch.cuda.synchronize(device)
        free, self.total = torch.cuda.mem_get_info(device)
        self._others = Segments(0, 0, 0)
        self._others = self.segments()
        self._before = torch.cuda.memory_reserved(device)
        self.context = self.total - free - self._before

    def in_use(self) -> int:
        """The driver's figure."""
        torch.cuda.synchronize(self.device)
        return self.total - torch.cuda.mem_get_info(self.device)[0] - self._before

    def reserved(self) -> int:
        """Of it, what torch's allocator took from the driver."""
        return torch.cuda.memory_reserved(self.device) - self._before

    def beside_torch(self) -> int:
        """Of it, the rest: context, kernels and libraries, nodes of graphs."""
        return self.in_use() - self.reserved()

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
        """From here on torch's allocator gives unused memory back, or fails, before the driver's figure passes
        ``budget``. It holds for the whole process, until another engine is built or ``lift`` is called.

        Raises:
            CapacityError: the figure is above the budget already.
        """
        in_use = self.in_use()
        if in_use > budget:
            raise CapacityError(
                f"the device has {in_use} bytes in use once the engine is ready, more than the memory budget of "
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
