"""Embeddings: torch's and Triton's rows against the plain ones, on the GPU or in the interpreter."""

from __future__ import annotations

import pytest
import torch

from sidestream.ops.embedding import reference, torch_impl, triton_embed
from tests.ops.triton_mode import DEVICE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copies", [1, 4])
@pytest.mark.parametrize(("tokens", "hidden"), [(0, 8), (1, 8), (5, 24), (3, 1500)])
def test_rows_are_copied(tokens: int, hidden: int, copies: int, dtype: torch.dtype) -> None:
    """Exactly, and nothing else of the table is read."""
    ids = torch.randint(2, 7, (tokens,))
    table = torch.full((9, hidden), torch.nan, dtype=dtype)
    table[2:7] = torch.randn(5, hidden).to(dtype)
    want = reference.embed(ids, table, copies=copies)
    for module in (torch_impl, triton_embed):
        got = module.embed(ids.to(DEVICE), table.to(DEVICE), copies=copies)
        assert got.is_contiguous()
        assert torch.equal(got.cpu(), want), module.__name__


def test_a_token_that_the_table_lacks_reads_nothing() -> None:
    table = torch.randn(9, 8)[2:6]
    got = triton_embed.embed(torch.tensor([-1, 0, 4]).to(DEVICE), table.to(DEVICE), copies=2).cpu()
    assert got[[0, 2]].isnan().all()
    assert torch.equal(got[1], table[:1].expand(2, -1))


def test_what_the_kernel_takes() -> None:
    ids, table = torch.zeros(4, dtype=torch.int64), torch.randn(9, 8)
    assert triton_embed.takes(ids, table)
    assert not triton_embed.takes(ids[::2], table)
    assert not triton_embed.takes(ids, table[:, ::2])
