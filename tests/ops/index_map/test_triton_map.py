"""The Triton index map in the interpreter or on the GPU, against the reference."""

from __future__ import annotations

import pytest
import torch

from sidestream.ops.index_map import reference
from sidestream.ops.index_map.triton_map import MapPlan, logical_to_physical
from tests.ops.triton_mode import DEVICE

POISON = 0x7F7F7F7F
SMALL = MapPlan(block=4, warps=1)


@pytest.mark.parametrize("block_size", [8, 12])
@pytest.mark.parametrize("dtypes", [(torch.int32, torch.int64), (torch.int64, torch.int32)])
def test_rows_of_every_kind(block_size: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    width, blocks = 11, 5
    table = torch.randperm(200)[: 4 * blocks].view(4, blocks).to(dtypes[0])
    token_rows = torch.tensor([0, 2, 2, 1, 3, 0, 1, 1])
    valid = [0, 1, width - 1, width, width, 4, 8, 5]  # also at, and one behind, the end of a program's entries
    logical = torch.full((8, width), -1, dtype=torch.int32)
    for t, count in enumerate(valid):
        logical[t, :count] = torch.randperm(blocks * block_size)[:count].sort().values.to(torch.int32)
    want, want_counts = torch.full((8, width), POISON, dtype=dtypes[1]), torch.full((8,), POISON, dtype=torch.int32)
    out, counts = want.clone().to(DEVICE), want_counts.clone().to(DEVICE)
    reference.logical_to_physical(
        logical, table, token_rows=token_rows, block_size=block_size, out=want, counts=want_counts
    )
    for plan in (SMALL, MapPlan(block=16, warps=1)):
        out.fill_(POISON)
        counts.fill_(POISON)
        logical_to_physical(
            logical.to(DEVICE),
            table.to(DEVICE),
            token_rows=token_rows.to(DEVICE),
            block_size=block_size,
            out=out,
            counts=counts,
            plan=plan,
        )
        assert torch.equal(out.cpu(), want)
        assert counts.tolist() == want_counts.tolist() == valid


def test_strides_and_neighbouring_memory() -> None:
    table_holder = torch.full((6, 9), 10**6, device=DEVICE)
    table_holder[::2, 1::2] = torch.randperm(30)[:12].view(3, 4).to(DEVICE)
    table = table_holder[::2, 1::2]
    logical = torch.full((8, 14), POISON, dtype=torch.int32, device=DEVICE)[::2, 1:12:2]
    logical.copy_(torch.randint(-1, 32, (4, 6)).sort(dim=1, descending=True).values)
    out_holder = torch.full((8, 20), POISON, device=DEVICE)
    count_holder = torch.full((8,), POISON, dtype=torch.int32, device=DEVICE)
    token_rows = torch.tensor([2, 9, 0, 9, 1, 9, 1, 9], device=DEVICE)[::2]
    logical_to_physical(
        logical,
        table,
        token_rows=token_rows,
        block_size=8,
        out=out_holder[::2, 3:9],
        counts=count_holder[1::2],
        plan=SMALL,
    )
    want, want_counts = torch.zeros(4, 6, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    reference.logical_to_physical(
        logical.cpu(), table.cpu(), token_rows=token_rows.cpu(), block_size=8, out=want, counts=want_counts
    )
    assert torch.equal(out_holder[::2, 3:9].cpu(), want)
    assert torch.equal(count_holder[1::2].cpu(), want_counts)
    assert (out_holder[1::2] == POISON).all()
    assert (out_holder[:, 9:] == POISON).all()
    assert (out_holder[:, :3] == POISON).all()
    assert (count_holder[::2] == POISON).all()


def test_rows_beyond_32_bits_and_no_tokens() -> None:
    out = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    counts = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    table = torch.tensor([[2**27]], dtype=torch.int32, device=DEVICE)
    logical = torch.tensor([[63, -1]], dtype=torch.int32, device=DEVICE)
    row = torch.tensor([0], device=DEVICE)
    logical_to_physical(logical, table, token_rows=row, block_size=64, out=out, counts=counts)
    assert out.tolist() == [[2**33 + 63, -1]]
    assert counts.tolist() == [1]
    logical_to_physical(logical[:0], table, token_rows=row[:0], block_size=64, out=out[:0], counts=counts[:0])
    logical_to_physical(logical[:, :0], table, token_rows=row, block_size=64, out=out[:, :0], counts=counts)
    assert counts.tolist() == [0]
