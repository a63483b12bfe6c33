"""Linear layers of 2 to 64 rows by warps with roles (Gluon, Hopper only): four stream the weight, four multiply.

A program has one to four times 64 weight rows and a part of the depth. The copy engine brings depths of 64 to shared
memory as far ahead as it has room, and the first of them before the kernel in front has ended, since they are nobody's
result: while a step's small kernels wait for one another, up to 200 KB a multiprocessor are on their way. What is
multiplied is the weight's rows by the rows of x, 64 by 16, 32 or 64, so few rows of x waste nothing. Gluon has no
interpreter: without a GPU, tests run this source in torch and look at what it compiles to.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton reads annotations as types of kernel arguments, so tensors and numbers stay without one.

from __future__ import annotations

from functools import cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sidestream.ops.linear.launches import Stream
from sidestream.ops.linear.triton_linear import sum_parts

DEPTH = 64
"""Elements of a step: 128 bytes, a line of the swizzled layout."""


def takes(x: torch.Tensor) -> bool:
    """Whether the copy engine is there and can bring these rows, of those that ``triton_linear.takes`` allows: at
    multiples of 16 bytes, and none over another."""
    apart = x.stride(0)
    return apart % 8 == 0 and apart >= x.shape[1] and x.data_ptr() % 16 == 0 and _is_hopper(x.device)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    launch: Stream,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``triton_linear.linear``, for what ``takes`` allows and at most ``launch.rows`` rows. If ``early``, the weight
    is read while kernels in front still run: none of them may write it."""
    T, K = x.shape
    N = weight.shape[0]
    assert 0 < T <= launch.rows, f"{T} rows in a launch for {launch.rows}"
    if out is None:
        out = torch.empty(T, N, dtype=x.dtype, device=x.device)
    splits, steps = launch.splits, launch.steps
    assert splits * steps * DEPTH == K, f"{launch} for a depth of {K}"
    target = out if splits == 1 else torch.empty(splits, T, N, dtype=torch.float32, device=x.device)
    _stream[(triton.cdiv(N, 64 * launch.groups), splits)](
        _described(x, launch.rows),
        _described(weight, 64),
        out if bias is None else bias,
        target,
        T,
        N,
        steps,
        rows=launch.rows,
        groups=launch.groups,
        stages=launch.stages,
        biased=bias is not None and splits == 1,
        early=launch.early,
        num_warps=4,
        **({"launch_pdl": True} if launch.early else {}),
    )
    if splits > 1:
        sum_parts(target, bias, out, early=launch.early)
    return out


def _described(matrix: torch.Tensor, rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([rows, DEPTH], gl.bfloat16)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, DEPTH], layout)


@gluon.jit
def _multiply(memory, barriers, out, sizes, kinds):
    """64 * ``groups`` weight rows times all rows of x, each group's sums in registers."""
    given, factors, bias = memory
    full, empty = barriers
    T, N, steps, first, part = sizes
    rows, groups, stages, biased, early = kinds
    products: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])
    a = gl.zeros([64, rows], gl.float32, layout=products)
    b = gl.zeros([64, rows], gl.float32, layout=products)
    c = gl.zeros([64, rows], gl.float32, layout=products)
    d = gl.zeros([64, rows], gl.float32, layout=products)
    for step in range(steps):
        stage = step % stages
        mbarrier.wait(full.index(stage), (step // stages) & 1)
        x = given.index(stage).permute((1, 0))
        a = warpgroup_mma(factors.index(stage * groups), x, a, is_async=True)
        if groups > 1:
            b = warpgroup_mma(factors.index(stage * groups + 1), x, b, is_async=True)
        if groups > 2:
            c = warpgroup_mma(factors.index(stage * groups + 2), x, c, is_async=True)
        if groups > 3:
            d = warpgroup_mma(factors.index(stage * groups + 3), x, d, is_async=True)
        if groups == 1:
            a = warpgroup_mma_wait(1, [a])
        elif groups == 2:
            a, b = warpgroup_mma_wait(2, [a, b])
        elif groups == 3:
            a, b, c = warpgroup_mma_wait(3, [a, b, c])
        else:
            a, b, c, d = warpgroup_mma_wait(4, [a, b, c, d])
        mbarrier.arrive(empty.index((step + stages - 1) % stages), count=1, pred=step > 0)
    if groups == 1:
        a = warpgroup_mma_wait(0, [a])
    elif groups == 2:
        a, b = warpgroup_mma_wait(0, [a, b])
    elif groups == 3:
        a, b, c = warpgroup_mma_wait(0, [a, b, c])
    else:
        a, b, c, d = warpgroup_mma_wait(0, [a, b, c, d])
    if early:
        gdc_launch_dependents()  # late, so that programs of the next kernel spread over all multiprocessors
    _write(a, bias, out, T, N, first, part, rows, biased)
    if groups > 1:
        _write(b, bias, out, T, N, first + 64, part, rows, biased)
    if groups > 2:
        _write(c, bias, out, T, N, first + 128, part, rows, biased)
    if groups > 3:
        _write(d, bias, out, T, N, first + 192, part, rows, biased)


@gluon.jit
def _write(total, bias, out, T, N, first, part, rows: gl.constexpr, biased: gl.constexpr):
    """[64, rows] to out [T, N], or to that part's of out [parts, T, N]."""
    by_row: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    total = gl.convert_layout(total, by_row)
    n = first + gl.arange(0, 64, layout=gl.SliceLayout(1, by_row))
    t = gl.arange(0, rows, layout=gl.SliceLayout(0, by_row))
    if biased:
        total += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    at = out + (part.to(gl.int64) * T + t[None, :]) * N + n[:, None]
    gl.store(at, total.to(out.dtype.element_ty), mask=(t < T)[None, :] & (n < N)[:, None])


@gluon.jit
def _supply(sources, memory, barriers, sizes, kinds):
    """Depths of the weight and of x to shared memory; of the weight, before x is there."""
    x, weight = sources
    given, factors, _ = memory
    full, empty = barriers
    _, _, steps, first, part = sizes
    rows, groups, stages, _, early = kinds
    begin = part * steps * 64
    for i in gl.static_range(stages):
        mbarrier.expect(full.index(i), (groups * 64 + rows) * 128)
        for group in gl.static_range(groups):
            tma.async_copy_global_to_shared(
                weight, [first + group * 64, begin + i * 64], full.index(i), factors.index(i * groups + group)
            )
    if early:
        gdc_wait()
    for i in gl.static_range(stages):
        tma.async_copy_global_to_shared(x, [0, begin + i * 64], full.index(i), given.index(i))
    for step in range(stages, steps):
        stage = step % stages
        mbarrier.wait(empty.index(stage), ((step // stages) & 1) ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, (groups * 64 + rows) * 128)
        for group in gl.static_range(groups):
            tma.async_copy_global_to_shared(
                weight, [first + group * 64, begin + step * 64], ready, factors.index(stage * groups + group)
            )
        tma.async_copy_global_to_shared(x, [0, begin + step * 64], ready, given.index(stage))


@gluon.jit(do_not_specialize=["T", "steps"])
def _stream(
    x,
    weight,
    bias,
    out,
    T,
    N,
    steps,
    rows: gl.constexpr,
    groups: gl.constexpr,
    stages: gl.constexpr,
    biased: gl.constexpr,
    early: gl.constexpr,
):
    """out [T, N], or with several parts of the depth sums [parts, T, N] fp32. ``x`` and ``weight`` are descriptors;
    ``steps``, of each part, are at least ``stages``, of which there are two or as many as steps: a stage is given back
    once the next one is being multiplied."""
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, 64], gl.bfloat16)
    factors = gl.allocate_shared_memory(gl.bfloat16, [stages * groups, 64, 64], tile)
    given = gl.allocate_shared_memory(gl.bfloat16, [stages, rows, 64], narrow)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    kinds: gl.constexpr = (rows, groups, stages, biased, early)
    sizes = (T, N, steps, gl.program_id(0) * (64 * groups), gl.program_id(1))
    memory = (given, factors, bias)
    barriers = (full, empty)
    gl.warp_specialize(
        [
            (_multiply, (memory, barriers, out, sizes, kinds)),
            (_supply, ((x, weight), memory, barriers, sizes, kinds)),
        ],
        [4],
        [40],
    )
