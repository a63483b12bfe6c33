"""Row copies by the tensor memory accelerator: a row is one request, through shared memory (Gluon, Hopper only)."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MOST_WORDS = 256
"""Of a row: a request is no wider."""


def takes(pool: torch.Tensor, host: torch.Tensor) -> bool:
    """Whether rows and their strides are whole pieces of 16 bytes, and rows short enough for one request."""
    sizes = [count * pool.itemsize for count in (pool.shape[1], pool.stride(0), host.stride(0))]
    aligned = not any(at % 16 for at in (*sizes, pool.data_ptr(), host.data_ptr()))
    return aligned and sizes[0] <= 4 * MOST_WORDS


@gluon.jit(do_not_specialize=["list_row", "programs"])
def _copy_rows_bulk_kernel(
    pool, host, to, source, counts, list_row, programs, WORDS: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    row = gl.allocate_shared_memory(gl.int32, [1, WORDS], host.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    request = gl.program_id(0).to(gl.int64) // programs
    first = gl.program_id(0) % programs
    source += request * list_row
    to += request * list_row
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    count = gl.load(counts + request)
    turn = 0
    for index in range(first, count, programs):
        mbarrier.expect(arrived, 4 * WORDS)
        tma.async_copy_global_to_shared(host, [gl.load(source + index).to(gl.int32), 0], arrived, row)
        goes = gl.load(to + index).to(gl.int32)
        mbarrier.wait(arrived, turn)
        tma.async_copy_shared_to_global(pool, [goes, 0], row)
        tma.store_wait(0)
        turn ^= 1
    mbarrier.invalidate(arrived)


def copy_rows(
    pool: torch.Tensor,
    host: torch.Tensor,
    *,
    to: torch.Tensor,
    source: torch.Tensor,
    counts: torch.Tensor,
    programs: int,
    pdl: bool,
) -> None:
    """As ``triton_copy.copy_rows`` for rows that it ``takes``, in so many programs a request."""
    words, host_words = pool.view(torch.int32), host.view(torch.int32)
    block = [1, triton.next_power_of_2(words.shape[1])]  # what is behind a row's end arrives as zeros, and stays
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    _copy_rows_bulk_kernel[(to.shape[0] * programs,)](
        TensorDescriptor.from_tensor(words, block, layout), TensorDescriptor.from_tensor(host_words, block, layout),
        to, source, counts, to.stride(0), programs, WORDS=block[1], PDL=pdl, launch_pdl=pdl, num_warps=1,
    )  # fmt: skip
