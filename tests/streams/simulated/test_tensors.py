"""What torch does on ``device="sim"`` is what it does on a CPU, bit for bit, also late and inside inference mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from sidestream.streams.simulated import DeviceFaultError, Order, SimulatedBackend
from sidestream.streams.simulated.tensor import HostTensor, SimTensor

Make = Callable[..., torch.Tensor]


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 1:3].mul_(2).add_(1)
    y[0] = 5
    y.t().neg_()
    return y


def indexed(x: torch.Tensor) -> torch.Tensor:
    rows = torch.tensor([2, 0], device=x.device)
    y = x.clone()
    y[rows] = x[rows] * 2
    y.index_add_(0, rows, torch.ones_like(x[:2]))
    y.index_copy_(1, rows, x[:, :2])
    return torch.cat([y, y.index_select(1, rows)], dim=1)


PROGRAMS: dict[str, Callable[[torch.Tensor], object]] = {
    "matmul of views": lambda x: x[:, :3] @ x[:3],
    "linear": lambda x: F.linear(x, x, x[0]),
    "einsum": lambda x: torch.einsum("ab,cb->ac", x, x),
    "softmax of a transposed": lambda x: x.t().softmax(-1),
    "reshape that copies": lambda x: x.t().reshape(-1),
    "topk": lambda x: x.topk(2),
    "sort": lambda x: x.sort(dim=-1, stable=True),
    "chunk and stack": lambda x: torch.stack([part * i for i, part in enumerate(torch.chunk(x, 2, dim=1))]),
    "in place": in_place,
    "indexed": indexed,
    "dtype": lambda x: (x.to(torch.bfloat16) * 3).float(),
    "mask": lambda x: torch.where(x > 0, x, -1.0).masked_fill(x > 1, 7.0),
    "mask that makes the host wait": lambda x: x[x > 0],
    "nonzero": lambda x: (x > 0).nonzero(),
    "factories": lambda x: (
        torch.arange(5, device=x.device)[None] * torch.full((5, 1), 2, device=x.device) + x.new_zeros(5).long()
    ),
    "arange with a step": lambda x: torch.arange(1, 9, 3, dtype=torch.int32, device=x.device),
    "out argument": lambda x: torch.mul(x, x, out=torch.empty_like(x)),
    "layer norm": lambda x: F.layer_norm(x, (x.shape[-1],)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "scalars": lambda x: x * x.sum().item() + float(x.max()),
    "gather": lambda x: x.gather(1, x.argsort(dim=1)),
    "cumsum": lambda x: x.cumsum(0).amax(dim=0, keepdim=True).expand(3, -1),
    "empty": lambda x: torch.cat([x[:0], x]) @ x.new_ones(x.shape[1], 0),
    "data": lambda x: torch.tensor([[1, 2], [3, 4]], device=x.device).repeat(2, 1),
}


def to_host(value: object) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """(strides, values) of each result."""
    items = [value] if isinstance(value, torch.Tensor) else value
    assert isinstance(items, (tuple, list))
    return [(item.stride(), item.cpu()) for item in items]


@pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference mode"])
@pytest.mark.parametrize("order", [Order.INLINE, Order.LAZY, Order.RANDOM], ids=lambda o: o.value)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_a_program_equals_the_cpu(program: Callable[[torch.Tensor], object], order: Order, inference: bool) -> None:
    host = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    wanted = to_host(program(host))
    backend = SimulatedBackend(order, seed=7)
    with torch.inference_mode(inference):
        found = to_host(program(host.to("sim")))
    backend.check()
    for (stride, one), (strides, other) in zip(wanted, found, strict=True):
        assert stride == strides
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_work_is_late_and_fresh_memory_is_poison() -> None:
    backend = SimulatedBackend(Order.LAZY)
    x = torch.ones(3, device="sim")
    assert isinstance(x, SimTensor)
    assert x.elem.isnan().all()
    assert (torch.empty(3, dtype=torch.int32, device="sim").cpu() == 0x7F7F7F7F).all()
    assert torch.empty(3, dtype=torch.bfloat16, device="sim").cpu().isnan().all()
    backend.synchronize()
    assert x.elem.tolist() == [1.0] * 3


def test_a_missing_wait_shows_in_the_values() -> None:
    backend = SimulatedBackend(Order.STARVED, starved="default")
    side = backend.new_stream("side")
    x = torch.ones(3, device="sim")
    with backend.use(side):
        y = x * 2
    assert y.cpu().isnan().all()


def test_a_fault_comes_late_and_names_its_line() -> None:
    backend = SimulatedBackend(Order.LAZY)
    pool = torch.zeros(4, 2, device="sim")
    never_written = torch.empty(2, dtype=torch.int64, device="sim")
    picked = pool.index_select(0, never_written)
    assert picked.shape == (2, 2)
    with pytest.raises(DeviceFaultError, match=r"index_select.*test_tensors\.py:\d+ \(test_a_fault_comes_late"):
        backend.synchronize()


def test_devices_do_not_mix() -> None:
    backend = SimulatedBackend()
    x = torch.zeros(3, device="sim")
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.zeros(3)
    with pytest.raises(RuntimeError, match="same device"):
        x + backend.host_buffer((3,), dtype=torch.float32)
    assert (x + torch.tensor(2.0)).tolist() == [2.0] * 3  # a scalar may stay on the host
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()
    with pytest.raises(NotImplementedError, match="changes the shape"):
        x.unsqueeze_(0)


def test_host_values_are_taken_when_work_is_issued() -> None:
    SimulatedBackend(Order.LAZY)
    scalar, rows = torch.tensor(2.0), torch.ones(3)
    x = torch.ones(3, device="sim") * scalar
    scalar.fill_(100)
    assert x.tolist() == [2.0] * 3
    y = torch.empty(3, device="sim")
    y.copy_(rows)
    rows.fill_(100)
    assert y.tolist() == [1.0] * 3


def test_page_locked_memory_is_the_hosts_and_copies_of_it_are_late() -> None:
    backend = SimulatedBackend(Order.LAZY)
    buffer = backend.host_buffer((2, 3), dtype=torch.float32)
    assert isinstance(buffer, HostTensor)
    assert buffer.is_pinned()
    assert buffer.device.type == "cpu"
    assert not torch.zeros(1).is_pinned()
    assert torch.isnan(buffer).all()
    buffer.copy_(torch.arange(6.0).view(2, 3))
    buffer[1] += 1
    x = torch.empty(2, 3, device="sim").copy_(buffer, non_blocking=True)
    buffer.zero_()  # too early: the copy has not run
    assert x.tolist() == [[0.0] * 3] * 2
    assert any("copy page-locked memory to the device" in hazard.detail for hazard in backend.hazards())


def test_a_late_copy_to_the_host_is_read_after_its_event() -> None:
    backend = SimulatedBackend(Order.LAZY)
    x = torch.full((3,), 4.0, device="sim")
    out, event = x.to("cpu", non_blocking=True), backend.new_event(external=False)
    backend.record(event)
    assert isinstance(out, HostTensor)
    assert not backend.event_done(event)
    backend.synchronize_event(event)
    assert backend.event_done(event)
    assert out.numpy().tolist() == [4.0] * 3
    with pytest.raises(ValueError, match="read-only"):
        out.numpy()[0] = 1
    backend.check()
