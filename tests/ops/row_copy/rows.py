"""Random rows of the host, some of them listed, and what must come of copying those."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sidestream.ops.row_copy import reference

ELEMS = (528, 656, 512, 1040, 4, 66, 33)
"""Of a row: bytes, and for 512 numbers of bf16."""


def check_rows(copy: Callable[..., None], elems: int, *, device: str) -> None:
    """Counts from none to all that are listed; what stands behind them is not read, and nothing else is written."""
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
    got = pool.to(device)
    to, source, counts = (tensor.to(device) for tensor in (to, source, counts))
    copy(got, host if device == "cpu" else host.pin_memory(), to=to, source=source, counts=counts, spare=(59, 0))
    assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))
