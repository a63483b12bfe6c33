"""One upload a step: fixed addresses, values that no later step overtakes, and a host that waits only when it must."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sidestream.errors import CapacityError
from sidestream.streams import Event, InlineBackend
from sidestream.streams.simulated import HazardError, Order
from sidestream.streams.upload import Narrow, PackedUpload
from tests.streams.programs import ORDERS, Machine

Array = npt.NDArray[np.int64]


def arrays(*shapes: tuple[int, ...], first: int = 1) -> list[Array]:
    """Arrays of the given shapes, counted through so that no two elements are equal."""
    made = []
    for shape in shapes:
        size = int(np.prod(shape))
        made.append(np.arange(first, first + size, dtype=np.int64).reshape(shape))
        first += size
    return made


def narrow(rows: int, count: int, columns: int, first: int) -> Narrow:
    return Narrow(arrays((rows, count), first=first)[0], columns)


def test_tensors_have_the_arrays_shapes_and_values() -> None:
    upload = PackedUpload(InlineBackend(), 64)
    given = [*arrays((3,), (2, 5), (1,), (0,), (4,)), np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2]]
    placed = upload.place(given)
    assert [tuple(tensor.shape) for tensor in placed] == [array.shape for array in given]
    assert all(tensor.dtype == torch.int64 for tensor in placed)
    for tensor, array in zip(placed, given, strict=True):
        assert tensor.tolist() == array.tolist()
    assert upload.place([]) == []
    assert upload.nbytes == 64 * 8


def test_equal_shapes_lie_at_equal_addresses_on_16_bytes() -> None:
    upload = PackedUpload(InlineBackend(), 64)
    shapes = ((3,), (2, 5), (1,), (7,))
    first = [tensor.data_ptr() for tensor in upload.place(arrays(*shapes))]
    upload.place(arrays((5,), (9,)))  # another shape in between
    for turn in range(4):
        assert [tensor.data_ptr() for tensor in upload.place(arrays(*shapes, first=100 * turn))] == first
    assert all(address % 16 == 0 for address in first)
    assert first == [first[0] + 8 * offset for offset in (0, 4, 14, 16)]


def test_an_address_depends_only_on_what_stands_before() -> None:
    upload = PackedUpload(InlineBackend(), 64)
    short = [tensor.data_ptr() for tensor in upload.place(arrays((3,), (4,), (5,)))]
    long = [tensor.data_ptr() for tensor in upload.place(arrays((3,), (4,), (20,), (2,)))]
    assert long[:3] == short
    moved = [tensor.data_ptr() for tensor in upload.place(arrays((5,), (4,), (5,)))]
    assert moved[0] == short[0]
    assert moved[1] != short[1]


def test_elements_says_what_is_needed_and_more_is_refused() -> None:
    sizes = (3, 10, 1, 0, 8)
    capacity = PackedUpload.elements(sizes)
    assert capacity == 4 + 10 + 2 + 0 + 8
    fitting = PackedUpload(InlineBackend(), capacity)
    given = arrays(*((size,) for size in sizes))
    before = fitting.place(given)
    with pytest.raises(CapacityError, match="need 26 elements, and 24 were set aside"):
        fitting.place([*given, np.ones(1, dtype=np.int64)])
    assert [tensor.tolist() for tensor in before] == [array.tolist() for array in given]
    with pytest.raises(CapacityError, match="need 24 elements, and 23 were set aside"):
        PackedUpload(InlineBackend(), capacity - 1).place(given)


@pytest.fixture(params=ORDERS, ids=lambda p: f"{p[0].value}-{p[1]}-{p[2]}")
def machine(request: pytest.FixtureRequest) -> Machine:
    return Machine(*request.param)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_values_are_right_over_many_steps(machine: Machine, depth: int) -> None:
    """The host runs ahead of the device; no step sees the arrays of another."""
    upload = PackedUpload(machine.backend, 32, depth=depth)
    results = machine.buffer(8, 6)
    with machine.on_compute():
        for step in range(8):
            ids, table = upload.place(arrays((2,), (2, 2), first=10 * step))
            results[step, :2].copy_(ids)
            results[step, 2:].copy_(table.view(-1))
    assert machine.read(results) == [[10.0 * step + i for i in range(6)] for step in range(8)]
    machine.backend.check()


def test_a_graph_reads_what_each_step_placed(machine: Machine) -> None:
    upload = PackedUpload(machine.backend, 32)
    source, result = machine.buffer(16), machine.buffer(3)
    with machine.on_compute():
        source.copy_(torch.arange(16.0, device="sim"))
        padding, rows = upload.place(arrays((5,), (3,)))
        with machine.streams.capture("whole") as graph:
            result.copy_(source.index_select(0, rows) * 2)
        for first in (0, 4, 1, 7):
            upload.place([np.zeros(5, dtype=np.int64), np.arange(first, first + 3, dtype=np.int64)])
            graph.replay()
            assert machine.read(result) == [2.0 * (first + i) for i in range(3)]
    assert padding.shape == (5,)
    machine.backend.check()


def test_a_graph_reads_the_columns_that_each_step_placed(machine: Machine) -> None:
    """Of an array of one width, however many of its columns travelled."""
    upload = PackedUpload(machine.backend, 64)
    result = machine.buffer(4, 6)
    with machine.on_compute():
        wide = upload.place([*arrays((2,)), narrow(4, 1, 6, 1)])[1]
        with machine.streams.capture("whole") as graph:
            result.copy_(wide)
        for count in (2, 5, 3, 3, 6, 1):
            given = narrow(4, count, 6, 10 * count)
            upload.place([*arrays((2,)), given])
            graph.replay()
            assert machine.read(result) == given.whole().astype(float).tolist()
    machine.backend.check()


class Counting:
    """Counts how often the host asked to wait for a copy, and whether it was still to run then."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch, *, wait: bool = True) -> None:
        self.asked: list[bool] = []
        original = machine.backend.synchronize_event

        def synchronize_event(event: Event) -> None:
            self.asked.append(machine.backend.event_done(event))
            if wait:
                original(event)

        monkeypatch.setattr(machine.backend, "synchronize_event", synchronize_event)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_host_waits_for_the_copy_of_depth_calls_ago(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(Order.LAZY)
    counting = Counting(machine, monkeypatch)
    upload = PackedUpload(machine.backend, 32, depth=depth)
    with machine.on_compute():
        for step in range(depth):
            upload.place(arrays((4,), first=step))
        assert counting.asked == []  # every buffer is new
        upload.place(arrays((4,)))
        assert counting.asked == [False]  # lazily: the copy had not run until the host needed its buffer
        machine.backend.synchronize()
        upload.place(arrays((4,)))
        assert counting.asked == [False, True]


def test_a_host_that_does_not_wait_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(Order.LAZY)
    Counting(machine, monkeypatch, wait=False)
    upload = PackedUpload(machine.backend, 32)
    with machine.on_compute():
        for step in range(3):
            upload.place(arrays((4,), first=step))
    with pytest.raises(HazardError, match=r"upload\.py"):
        machine.backend.check()


def test_a_narrow_array_lies_at_one_address_with_zeros_behind_its_columns() -> None:
    """Whatever stands around it, however many columns it has, and whatever was placed there in between."""
    upload = PackedUpload(InlineBackend(), 96)
    places = set()
    for turn, (count, extra) in enumerate([(3, 2), (5, 9), (2, 2), (1, 0), (8, 1), (2, 5)]):
        given: list[Array | Narrow] = [*arrays((4,), first=700), narrow(3, count, 8, 10 * turn + 1)]
        given += arrays((extra,), first=900)
        placed = upload.place(given)
        places.add(placed[1].data_ptr())
        assert placed[1].shape == (3, 8)
        assert placed[1].is_contiguous()
        for tensor, array in zip(placed, given, strict=True):
            assert tensor.tolist() == (array.whole() if isinstance(array, Narrow) else array).tolist()
        if turn % 2:  # over it
            upload.place(arrays((96,), first=5000))
    assert len(places) == 1
    other = upload.place([narrow(4, 2, 6, 1)])[0]
    assert other.tolist() == narrow(4, 2, 6, 1).whole().tolist()
    again = upload.place([narrow(3, 2, 8, 1)])[0]
    assert again.tolist() == narrow(3, 2, 8, 1).whole().tolist()
    assert again.data_ptr() in places


@pytest.mark.parametrize("other", [arrays((64,), first=5000), [*arrays((45,), first=5000), narrow(2, 1, 6, 1)]])
def test_an_interrupt_behind_another_upload_costs_a_narrow_array_nothing(
    other: list[Array | Narrow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was on its way when it came lies where the array did, be it narrow as well."""
    upload = PackedUpload(InlineBackend(), 64)
    given = narrow(3, 2, 8, 1)
    upload.place([given])

    def interrupted(_event: Event) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(upload._backend, "record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            upload.place(other)
    assert upload.place([given])[0].tolist() == given.whole().tolist()


def test_a_narrow_array_needs_room_for_its_columns_beside_its_place() -> None:
    upload = PackedUpload(InlineBackend(), 4 + 6 + 24)
    given: list[Array | Narrow] = [*arrays((4,)), narrow(3, 2, 8, 9)]
    assert upload.place(given)[1].tolist() == narrow(3, 2, 8, 9).whole().tolist()
    with pytest.raises(CapacityError, match="need 37 elements, and 34 were set aside"):
        upload.place([*arrays((4,)), narrow(3, 3, 8, 9)])
