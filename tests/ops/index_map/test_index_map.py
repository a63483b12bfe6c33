"""Logical to physical: every kind of row, strides, dtypes, and a table that must not be read beyond what is used."""

from __future__ import annotations

import pytest
import torch

from sidestream.ops.index_map import logical_to_physical, reference

pytestmark = pytest.mark.usefixtures("either_library")
POISON = 0x7F7F7F7F


@pytest.mark.parametrize("block_size", [8, 12, 64])
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("out_dtype", [torch.int32, torch.int64])
def test_rows_of_every_kind(block_size: int, table_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    width, blocks = 11, 5
    table = torch.randperm(200)[: 4 * blocks].view(4, blocks).to(table_dtype)
    token_rows = torch.tensor([0, 2, 2, 1, 3, 0])
    valid = [0, 1, width - 1, width, width, 0]  # the last is a padding row that points at a live sequence
    logical = torch.full((6, width), -1, dtype=torch.int32)
    for t, count in enumerate(valid):
        logical[t, :count] = torch.randperm(blocks * block_size)[:count].sort().values.to(torch.int32)
    logical[4, -1] = blocks * block_size - 1
    got, counts = torch.full((6, width), POISON, dtype=out_dtype), torch.full((6,), POISON, dtype=torch.int32)
    want, want_counts = got.clone(), counts.clone()
    logical_to_physical(logical, table, token_rows=token_rows, block_size=block_size, out=got, counts=counts)
    reference.logical_to_physical(
        logical, table, token_rows=token_rows, block_size=block_size, out=want, counts=want_counts
    )
    assert torch.equal(got, want)
    assert counts.tolist() == want_counts.tolist() == valid
    for t, count in enumerate(valid):
        assert (got[t, :count] >= 0).all()
        assert (got[t, count:] == -1).all()


def test_strides_and_neighbouring_memory() -> None:
    wide_table = torch.full((6, 9), 10**6)
    wide_table[::2, 1::2] = torch.randperm(30)[:12].view(3, 4)
    table = wide_table[::2, 1::2]
    logical_holder = torch.full((8, 14), POISON, dtype=torch.int32)
    logical = logical_holder[::2, 1:12:2]
    logical.copy_(torch.randint(-1, 32, (4, 6)).sort(dim=1, descending=True).values)
    out_holder = torch.full((8, 20), POISON)
    count_holder = torch.full((8,), POISON, dtype=torch.int32)
    token_rows = torch.tensor([2, 9, 0, 9, 1, 9, 1, 9])[::2]
    logical_to_physical(
        logical, table, token_rows=token_rows, block_size=8, out=out_holder[::2, 3:9], counts=count_holder[1::2]
    )
    want, want_counts = torch.zeros(4, 6, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    reference.logical_to_physical(logical, table, token_rows=token_rows, block_size=8, out=want, counts=want_counts)
    assert torch.equal(out_holder[::2, 3:9], want)
    assert torch.equal(count_holder[1::2], want_counts)
    assert (out_holder[1::2] == POISON).all()
    assert (out_holder[:, 9:] == POISON).all()
    assert (count_holder[::2] == POISON).all()


def test_rows_beyond_32_bits() -> None:
    out, counts = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    table = torch.tensor([[2**27]], dtype=torch.int32)
    logical = torch.tensor([[63, -1]], dtype=torch.int32)
    logical_to_physical(logical, table, token_rows=torch.tensor([0]), block_size=64, out=out, counts=counts)
    assert out.tolist() == [[2**33 + 63, -1]]


def test_no_tokens() -> None:
    out, counts = torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
    logical = torch.zeros(0, 3, dtype=torch.int32)
    logical_to_physical(
        logical,
        torch.zeros(2, 2, dtype=torch.int64),
        token_rows=torch.zeros(0, dtype=torch.int64),
        block_size=8,
        out=out,
        counts=counts,
    )
