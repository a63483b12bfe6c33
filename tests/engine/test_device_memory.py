"""Readings of a device, against a made-up one: whose memory is counted, and what the allocator is held to."""

from __future__ import annotations

import pytest
import torch

from sidestream.engine.device_memory import GIB, MOST_BESIDE, SHARED_CONTEXT, DeviceMemory, Segments
from sidestream.errors import CapacityError

MIB = 2**20


class Device:
    """What torch says of it; ``segments`` are (bytes, of these in tensors, pool)."""

    def __init__(self) -> None:
        self.total = 100 * GIB
        self.others = 0
        self.beside = GIB // 2
        self.segments: list[tuple[int, int, tuple[int, int]]] = []
        self.fraction = 1.0

    @property
    def reserved(self) -> int:
        return sum(size for size, _, _ in self.segments)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()

    def info(device: object) -> tuple[int, int]:
        return made.total - made.others - made.beside - made.reserved, made.total

    def snapshot() -> list[dict[str, object]]:
        return [{"total_size": t, "allocated_size": a, "segment_pool_id": p} for t, a, p in made.segments]

    def hold(fraction: float, device: object) -> None:
        made.fraction = fraction

    monkeypatch.setattr(torch.cuda, "mem_get_info", info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: made.reserved)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", hold)
    return made


def test_alone_the_drivers_figure_counts(device: Device) -> None:
    device.segments.append((3 * GIB, 2 * GIB, (0, 0)))  # of another engine in this process
    memory = DeviceMemory(torch.device("cuda"))
    assert memory.context == GIB // 2
    assert memory.in_use() == GIB // 2
    device.segments += [(4 * GIB, 3 * GIB, (0, 0)), (GIB, GIB // 2, (0, 1))]
    device.beside += 100 * MIB
    assert memory.beside_torch() == GIB // 2 + 100 * MIB
    assert memory.reserved() == 5 * GIB
    assert memory.in_use() == 5 * GIB + GIB // 2 + 100 * MIB
    assert memory.segments() == Segments(live=3 * GIB, free=GIB, pools=GIB)
    assert not memory.shared


def test_the_allocator_is_held_to_the_budget(device: Device) -> None:
    device.segments.append((3 * GIB, 2 * GIB, (0, 0)))
    memory = DeviceMemory(torch.device("cuda"))
    device.segments.append((4 * GIB, 3 * GIB, (0, 0)))
    memory.enforce(10 * GIB)
    assert device.fraction * device.total == 10 * GIB - GIB // 2 + 3 * GIB  # what it holds for others stays its own
    memory.lift()
    assert device.fraction == 1.0
    with pytest.raises(CapacityError, match=rf"{9 * GIB // 2} bytes.*{4 * GIB} bytes; raise memory_limit"):
        memory.enforce(4 * GIB)


@pytest.mark.parametrize("before", [True, False])
def test_other_processes_are_not_counted(device: Device, before: bool) -> None:
    if before:
        device.others = 30 * GIB
    memory = DeviceMemory(torch.device("cuda"))
    device.others = 30 * GIB
    device.segments.append((2 * GIB, GIB, (0, 0)))
    assert memory.in_use() == SHARED_CONTEXT + 2 * GIB
    assert memory.shared
    device.others = 0  # they are gone; the readings stay of one kind
    assert memory.in_use() == SHARED_CONTEXT + 2 * GIB
    memory.enforce(4 * GIB)
    assert device.fraction * device.total == 3 * GIB


def test_kernels_and_graphs_are_not_taken_for_others(device: Device) -> None:
    memory = DeviceMemory(torch.device("cuda"))
    device.beside = MOST_BESIDE
    assert memory.in_use() == MOST_BESIDE
    assert not memory.shared
