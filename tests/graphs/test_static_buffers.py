"""Static buffers: one address for all shapes, no new memory while frozen, poison that no value looks like."""

from __future__ import annotations

import math

import pytest
import torch

from sidestream.graphs.static_buffers import StaticBuffers

CPU = torch.device("cpu")


def test_every_shape_gets_the_first_rows_of_one_buffer() -> None:
    buffers = StaticBuffers(8, CPU)
    whole = buffers.take("x", (8, 3), torch.float32)
    some = buffers.take("x", (2, 3), torch.float32)
    assert some.shape == (2, 3)
    assert some.data_ptr() == whole.data_ptr() == buffers.existing("x", 5).data_ptr()
    some.fill_(7)
    assert whole.tolist() == [[7.0] * 3] * 2 + [[0.0] * 3] * 6
    assert buffers.existing("x", 5).shape == (5, 3)


def test_a_first_request_of_few_rows_makes_the_whole_buffer() -> None:
    buffers = StaticBuffers(8, CPU)
    few = buffers.take("x", (1, 3), torch.float32)
    assert buffers.take("x", (8, 3), torch.float32).data_ptr() == few.data_ptr()
    assert buffers.nbytes == 8 * 3 * 4


def test_hold_copies() -> None:
    buffers = StaticBuffers(4, CPU)
    given = torch.arange(12.0).view(4, 3).t()[:, :3]  # not contiguous
    held = buffers.hold("x", given)
    assert torch.equal(held, given)
    assert held.is_contiguous()
    given.fill_(-1)
    assert held[0, 1] == 3.0
    assert buffers.hold("x", torch.ones(2, 3)).data_ptr() == held.data_ptr()
    assert held.tolist() == [[1.0] * 3] * 2 + [[2.0, 5.0, 8.0]]


def test_names_and_bytes() -> None:
    buffers = StaticBuffers(4, CPU)
    assert (buffers.names, buffers.nbytes) == ((), 0)
    buffers.take("a", (4, 3), torch.bfloat16)
    buffers.take("b", (1,), torch.int64)
    buffers.take("c", (2, 2, 5), torch.uint8)
    assert buffers.names == ("a", "b", "c")
    assert buffers.nbytes == 4 * 3 * 2 + 4 * 8 + 4 * 10


def test_frozen_buffers_are_viewed_but_not_made() -> None:
    buffers = StaticBuffers(4, CPU)
    made = buffers.take("x", (4, 3), torch.float32)
    buffers.freeze()
    assert buffers.hold("x", torch.ones(4, 3)).data_ptr() == made.data_ptr()
    with pytest.raises(AssertionError, match="'y' is first asked for inside a capture"):
        buffers.take("y", (4, 3), torch.float32)
    with pytest.raises(AssertionError, match="'y' is first asked for inside a capture"):
        buffers.hold("y", torch.ones(4, 3))
    buffers.thaw()
    assert buffers.take("y", (4, 3), torch.float32).shape == (4, 3)


def test_another_shape_or_dtype_or_too_many_rows_is_a_bug() -> None:
    buffers = StaticBuffers(4, CPU)
    buffers.take("x", (4, 3), torch.float32)
    with pytest.raises(AssertionError, match=r"'x' has rows of \(3,\), not \(2,\)"):
        buffers.take("x", (4, 2), torch.float32)
    with pytest.raises(AssertionError, match=r"'x' has rows of \(3,\), not \(\)"):
        buffers.take("x", (4,), torch.float32)
    with pytest.raises(AssertionError, match=r"'x' is torch\.float32, not torch\.bfloat16"):
        buffers.take("x", (4, 3), torch.bfloat16)
    with pytest.raises(AssertionError, match="5 rows of static buffer 'x', which has 4"):
        buffers.take("x", (5, 3), torch.float32)
    with pytest.raises(AssertionError, match="5 rows of static buffer 'new', which has 4"):
        buffers.take("new", (5, 3), torch.float32)
    assert buffers.names == ("x",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_poisoned_floats_are_nan(dtype: torch.dtype) -> None:
    buffers = StaticBuffers(4, CPU)
    held = buffers.take("x", (2, 3), dtype)
    buffers.poison()
    assert all(math.isnan(value) for value in buffers.existing("x", 4).float().flatten().tolist())
    assert held.shape == (2, 3)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.int64, -(2**63)), (torch.int32, -(2**31)), (torch.int8, -128), (torch.uint8, 255)],
)
def test_poisoned_integers_are_the_one_value_that_is_no_index(dtype: torch.dtype, value: int) -> None:
    buffers = StaticBuffers(4, CPU)
    buffers.take("x", (2, 3), dtype)
    buffers.poison()
    assert buffers.existing("x", 4).tolist() == [[value] * 3] * 4
