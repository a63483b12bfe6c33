"""Captures on real CUDA: a failed one leaves nothing behind, and pools, random numbers and cold starts work."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sidestream.streams import Capture
from tests.gpu.streams.machine import Machine, N, plain_event

pytestmark = pytest.mark.gpu

SIZE = 64
"""Of the square matrices that are multiplied."""

Fault = Callable[[Machine, torch.Tensor], object]


def python_error(machine: Machine, x: torch.Tensor) -> None:
    raise KeyError("a bug")


def host_read(machine: Machine, x: torch.Tensor) -> None:
    x.sum().item()


def device_synchronize(machine: Machine, x: torch.Tensor) -> None:
    machine.backend.synchronize()


def plain_eager_event(machine: Machine, x: torch.Tensor) -> None:
    event = plain_event()
    with machine.on_side():
        event.record()
    event.wait()


def out_of_memory(machine: Machine, x: torch.Tensor) -> None:
    torch.empty(1 << 42, device=x.device)


def unjoined_side_stream(machine: Machine, x: torch.Tensor) -> None:
    ready = machine.handoff("forked")
    ready.publish()
    with machine.on_side():
        ready.wait()
        x.fill_(1)


def python_error_with_an_unjoined_side_stream(machine: Machine, x: torch.Tensor) -> None:
    unjoined_side_stream(machine, x)
    raise KeyError("a bug")


FAULTS: dict[Fault, str] = {
    python_error: "a bug",
    host_read: "operation not permitted when stream is capturing",
    device_synchronize: "operation not permitted when stream is capturing",
    plain_eager_event: "dependency created on uncaptured work",
    out_of_memory: "out of memory",
    unjoined_side_stream: "capturing stream has unjoined work",
    python_error_with_an_unjoined_side_stream: "a bug",
}
"""What goes wrong inside a capture, and what is raised."""


def capture_double(machine: Machine, x: torch.Tensor, pool: Any) -> tuple[Capture, torch.Tensor]:
    """A graph that computes 2x into memory of the pool."""
    with machine.on_compute(), machine.streams.capture("double", pool=pool) as graph:
        y = x * 2
    return graph, y


def pool_id(tensor: torch.Tensor) -> tuple[int, int]:
    """Of the allocator's pool that holds the tensor; (0, 0) is the ordinary one."""
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        if 0 <= tensor.data_ptr() - segment["address"] < segment["total_size"]:
            first, second = segment["segment_pool_id"]
            return int(first), int(second)
    raise AssertionError("no segment holds the tensor")


def held_pools() -> set[tuple[int, ...]]:
    """Pools that hold device memory."""
    return {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("first_in_pool", [True, False])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_failed_capture_leaves_nothing_behind(fault: Fault, first_in_pool: bool) -> None:
    machine = Machine()
    x, pool = machine.buffer(), machine.backend.new_pool()
    kept = None if first_in_pool else capture_double(machine, x, pool)
    torch.cuda.manual_seed(5)
    drawn = torch.randn(8, device=x.device)
    torch.cuda.manual_seed(5)

    def fail() -> None:
        with machine.on_compute(), machine.streams.capture("segment 0", pool=pool):
            torch.randn(8, device=x.device)
            x.fill_(1)
            fault(machine, x)

    with pytest.raises((RuntimeError, KeyError), match=FAULTS[fault]):
        fail()
    assert machine.streams.open_capture is None
    for entered in (machine.on_compute(), machine.on_side()):
        with entered:
            assert not torch.cuda.is_current_stream_capturing()
    assert torch.equal(torch.randn(8, device=x.device), drawn)
    with machine.on_compute():
        assert pool_id(torch.full((N,), 3.0, device=x.device)) == (0, 0)
    machine.backend.host_buffer((123_457,), dtype=torch.float32)

    again, y = capture_double(machine, x, pool)
    with machine.on_compute():
        x.fill_(4)
        again.replay()
        assert machine.value(y) == 8.0
        if kept is not None:
            x.fill_(3)
            kept[0].replay()
            assert machine.value(kept[1]) == 6.0


def test_a_pool_outlives_its_graphs() -> None:
    machine = Machine()
    x, pool = machine.buffer(), machine.backend.new_pool()
    for value in (1, 2):
        graph, y = capture_double(machine, x, pool)
        with machine.on_compute():
            x.fill_(value)
            graph.replay()
        assert machine.value(y) == 2.0 * value
        del graph, y
        gc.collect()


def test_memory_goes_back_with_the_pool_after_a_failure_too() -> None:
    machine = Machine()
    x = machine.buffer()

    def use_a_pool() -> tuple[int, ...]:
        pool = machine.backend.new_pool()
        graph, y = capture_double(machine, x, pool)
        with pytest.raises(RuntimeError), machine.on_compute(), machine.streams.capture("segment 0", pool=pool):
            (y + 1).sum().item()
        with machine.on_compute():
            graph.replay()
        assert machine.value(y) == 0.0
        assert pool_id(y) == tuple(pool.id)
        return tuple(pool.id)

    used = use_a_pool()
    gc.collect()
    torch.cuda.empty_cache()
    assert used not in held_pools()


def test_graphs_of_one_pool_share_their_temporaries() -> None:
    """The largest comes first, and the smaller ones reserve nothing."""
    machine = Machine()
    pool, backend = machine.backend.new_pool(), machine.backend
    captured: list[tuple[Capture, torch.Tensor, torch.Tensor]] = []
    grown = []
    for rows in (32, 16, 8):
        x = torch.ones(rows << 20, device=backend.device)
        backend.synchronize()
        before = torch.cuda.memory_reserved()
        with machine.on_compute(), machine.streams.capture(f"{rows} rows", pool=pool) as graph:
            out = ((x + 1) * 2).view(rows, -1).sum(1)
        grown.append(torch.cuda.memory_reserved() - before)
        captured.append((graph, x, out))
    assert grown[0] > 0
    assert grown[1:] == [0, 0]
    for graph, _, out in captured:
        with machine.on_compute():
            graph.replay()
        assert machine.value(out) == 4.0 * (1 << 20)


def test_an_empty_segment_is_no_fault() -> None:
    machine = Machine()
    with machine.on_compute():
        with machine.streams.capture("nothing between two breaks") as graph:
            pass
        graph.replay()
    machine.backend.synchronize()


def test_random_numbers_of_a_graph_follow_the_seed() -> None:
    machine = Machine()
    device = machine.backend.device
    with machine.on_compute(), machine.streams.capture("draw") as graph:
        drawn = torch.randn(8, device=device)

    def replay() -> torch.Tensor:
        with machine.on_compute():
            graph.replay()
        machine.backend.synchronize()
        return drawn.clone()

    torch.cuda.manual_seed(5)
    first, second = replay(), replay()
    torch.cuda.manual_seed(5)
    assert torch.equal(first, torch.randn(8, device=device))
    assert torch.equal(second, torch.randn(8, device=device))
    assert not torch.equal(first, second)


COLD_MATMUL = f"""
import torch
from sidestream.streams import Streams
from sidestream.streams.cuda import CudaBackend
backend = CudaBackend()
streams = Streams(backend)
with backend.use(streams.compute):
    x = torch.ones({SIZE}, {SIZE}, device=backend.device)
    with streams.capture("cold") as graph:
        y = x @ x
        z = y.sort().values
    graph.replay()
backend.synchronize()
assert z.amin().item() == z.amax().item() == {SIZE}
"""


def test_the_first_use_of_a_library_may_be_in_a_capture() -> None:
    done = subprocess.run([sys.executable, "-c", COLD_MATMUL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_other_threads_work_on_while_one_captures() -> None:
    machine = Machine()
    x, pool = machine.buffer(), machine.backend.new_pool()
    found: list[float] = []
    pools: list[tuple[int, int]] = []

    def other() -> None:
        made = torch.full((1 << 22,), 2.0, device=x.device)
        pools.append(pool_id(made))
        found.append(made.amax().item())

    with machine.on_compute(), machine.streams.capture("segment 0", pool=pool) as graph:
        y = x + 1
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        y.mul_(2)
    assert found == [2.0]
    assert pools == [(0, 0)]
    with machine.on_compute():
        graph.replay()
    assert machine.value(y) == 2.0


def test_a_graph_keeps_its_external_events() -> None:
    """CUDA's nodes hold bare handles: without a reference of ours, the process ends with a segmentation fault."""
    machine = Machine()
    backend, x = machine.backend, machine.buffer()

    def record_and_forget() -> None:
        backend.record(backend.new_event(external=True))

    def wait_and_forget() -> None:
        event = backend.new_event(external=True)
        with machine.on_side():
            event.raw.record()
        backend.wait(event)

    with machine.on_compute(), machine.streams.capture("segment 0") as graph:
        wait_and_forget()
        x.add_(1)
        record_and_forget()
    with machine.on_compute():
        for _ in range(3):
            graph.replay()
    assert machine.value(x) == 3.0


def test_garbage_is_collected_after_a_capture_not_inside() -> None:
    """torch 2.11 destroys a graph in a way that makes the capture that is open at the time invalid."""
    machine = Machine()
    x, pool = machine.buffer(), machine.backend.new_pool()
    owned: list[Any] = [capture_double(machine, x, pool)]
    with machine.on_compute(), machine.streams.capture("segment 0", pool=pool) as graph:
        cycle = [owned.pop()]
        cycle.append(cycle)
        del cycle
        young = [[i] for i in range(100_000)]  # far past the collector's threshold
        x.add_(len(young))
    assert gc.isenabled()
    gc.collect()
    with machine.on_compute():
        graph.replay()
    assert machine.value(x) == 100_000.0
