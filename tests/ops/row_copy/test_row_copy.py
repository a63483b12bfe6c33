"""Row copies of both implementations against the reference: counts, strides, row types, nothing beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sidestream.ops.row_copy import reference, torch_impl, triton_copy
from sidestream.ops.row_copy.triton_copy import CopyPlan
from tests.ops.triton_mode import DEVICE, INTERPRETED

PLANS = [
    CopyPlan(),
    CopyPlan(rows=2, programs=2),
    CopyPlan(rows=4, warps=2, programs=1),
    CopyPlan(vectors=True),
    CopyPlan(early=True, vectors=True),
    CopyPlan(rows=2, programs=2, early=True, vectors=True),
    CopyPlan(rows=4, warps=2, programs=1, early=True),
    CopyPlan(total=9),
    CopyPlan(total=1, early=True),
    CopyPlan(early=True, vectors=True, past_l1=True),
    *([] if INTERPRETED else [CopyPlan(early=True, vectors=True, pdl=True)]),
]


def triton_of(plan: CopyPlan) -> Callable[..., None]:
    return lambda *args, **named: triton_copy.copy_rows(*args, **named, plan=plan)


@pytest.mark.parametrize("elems", [528, 656, 512, 1040, 4, 66, 33])
@pytest.mark.parametrize("copy", [torch_impl.copy_rows, *map(triton_of, PLANS)], ids=["torch", *map(str, PLANS)])
def test_rows_arrive_whole_and_nothing_else_changes(copy: Callable[..., None], elems: int) -> None:
    gen = torch.Generator().manual_seed(elems)
    dtype = torch.bfloat16 if elems == 512 else torch.uint8
    host = torch.randint(0, 255, (40, elems), generator=gen, dtype=torch.uint8).to(dtype)
    pool = torch.full((60, elems), 77, dtype=dtype)
    to = torch.randperm(59, generator=gen)[:28].view(4, 7)
    source = torch.randint(0, 40, (4, 7), generator=gen)
    counts = torch.tensor([0, 7, 1, 4], dtype=torch.int32)
    for r, count in enumerate(counts.tolist()):
        to[r, count:] = source[r, count:] = 2**40  # not read
    want = pool.clone()
    reference.copy_rows(want, host, to=to, source=source, counts=counts, spare=(59, 0))
    # Torch does not index memory of the host by rows that a GPU holds, so it is tried on a CPU alone.
    device = "cpu" if copy is torch_impl.copy_rows else DEVICE
    got = pool.to(device)
    to, source, counts = (tensor.to(device) for tensor in (to, source, counts))
    copy(got, host if device == "cpu" else host.pin_memory(), to=to, source=source, counts=counts, spare=(59, 0))
    assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))
